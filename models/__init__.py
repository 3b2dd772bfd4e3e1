"""One file per family of models: what its configuration says and what sets it apart. Imports no torch."""
