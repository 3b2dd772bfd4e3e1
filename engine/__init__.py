"""One model on one device: block pool, prefix cache, scheduler, runner, sampler, weights."""
