"""Implementations that are wrong in three ways, for the self-check to find."""

from kernels import catalog
from kernels.caps import Caps

RIGHT = catalog.registry(Caps("cpu"))


def off_by_a_little(spec, x, residual, weight, eps, out, scale, **kwargs):
    RIGHT.get("add_rmsnorm_quant", spec)(x, residual, weight, eps, out, scale, **kwargs)
    scale.mul_(1.05)


def forgets_a_row(spec, x, residual, weight, eps, out, scale, **kwargs):
    keep = out[-1].clone()
    RIGHT.get("add_rmsnorm_quant", spec)(x, residual, weight, eps, out, scale, **kwargs)
    out[-1] = keep


def raises(spec, *args, **kwargs):
    raise RuntimeError("illegal memory access")
