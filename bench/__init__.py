"""Load generation, benchmarks, result files and the pages made from them."""
