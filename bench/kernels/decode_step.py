"""A decode step of Llama-8B from the library's operations, in one CUDA graph, without a scheduler."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.report.hardware_limits import READ_RATE
from kernels.decode_plan import DecodeGemmPlan, decode_plan
from kernels.reference.quant import to_e4m3, token_scale
from kernels.registry import Registry
from kernels.specs import AttnSpec, FusedAttnSpec, GateUpSpec, GemmSpec, NormSpec, Quant, QuantSpec, RopeSpec, SiluSpec
from kernels.timing import capture, replay_ms
from kernels.workspace import decode_workspace_nbytes

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
HIDDEN, INTER, Q_HEADS, KV_HEADS, DIM, VOCAB, PAGE = 4096, 14336, 32, 8, 128, 128256, 64
QKV = (Q_HEADS + 2 * KV_HEADS) * DIM
SHAPES = {"qkv": (QKV, HIDDEN), "o": (HIDDEN, Q_HEADS * DIM), "gate_up": (2 * INTER, HIDDEN), "down": (HIDDEN, INTER)}
NUM_LAYERS, CONTEXT = 32, 1088
EPS = 1e-5
DEVICE = "cuda"


@dataclass
class Linear:
    """The e4m3 weights `[n, k]` of a linear layer, with one scale per row."""

    weight: Tensor
    scale: Tensor

    @classmethod
    def random(cls, n: int, k: int) -> "Linear":
        dense = torch.randn(n, k, device=DEVICE, dtype=BF16) * 0.02
        scale = token_scale(dense).float()
        return cls(to_e4m3(dense / scale[:, None]), scale)


@dataclass
class Layer:
    linears: dict[str, Linear]
    norm_attn: Tensor
    norm_mlp: Tensor
    # Static scales of the attention output and of the MLP's middle. The row-wise product reads one copy per token.
    scale_o: Tensor = field(default_factory=lambda: torch.full((256,), 0.01, device=DEVICE))
    scale_mid: Tensor = field(default_factory=lambda: torch.full((256,), 0.01, device=DEVICE))

    @classmethod
    def random(cls) -> "Layer":
        gains = [torch.rand(HIDDEN, device=DEVICE).to(BF16) + 0.5 for _ in range(2)]
        return cls({name: Linear.random(*shape) for name, shape in SHAPES.items()}, *gains)


class Model:
    """The random weights of `num_layers` layers, with embedding, head and rotary table."""

    def __init__(self, num_layers: int = NUM_LAYERS):
        torch.manual_seed(0)
        self.layers = [Layer.random() for _ in range(num_layers)]
        self.norm = torch.ones(HIDDEN, device=DEVICE, dtype=BF16)
        self.head = Linear.random(VOCAB, HIDDEN)
        self.head_bf16 = (self.head.weight.float() * self.head.scale[:, None]).to(BF16)
        self.embed = torch.randn(VOCAB, HIDDEN, device=DEVICE, dtype=BF16)
        position = torch.arange(8192, device=DEVICE).float()[:, None]
        angle = position * 500000 ** (-torch.arange(0, DIM, 2, device=DEVICE).float() / DIM)
        self.cos_sin = torch.cat([angle.cos(), angle.sin()], 1).contiguous()


@dataclass(frozen=True)
class Tricks:
    """The choices of a step, each of which can be switched off alone."""

    pdl: bool = True
    ahead: bool = True  # weights are prefetched before the dependency wait
    early: bool = True  # dependents are triggered at kernel start
    fused_norm: bool = True
    fused_silu: bool = True
    fused_attention: bool = True  # includes rope, append and quantization
    group_scales: bool = False  # dynamic scales per 128 columns of o and middle
    static_norm: bool = False  # the norm quantizes by a given scale
    norm_warps: int = 0
    bf16_head: bool = False


class Step:
    """The buffers and bound operations of one batch size; `run` is one decode step."""

    def __init__(
        self,
        model: Model,
        registry: Registry,
        batch: int,
        context: int = CONTEXT,
        tricks: Tricks | None = None,
        plan: DecodeGemmPlan | None = None,
    ):
        self.model, self.batch, self.tricks = model, batch, tricks or Tricks()
        self.plan = plan or decode_plan(batch)
        if not self.tricks.fused_silu:
            self.plan = replace(self.plan, fused_gate_up=False)
        self.registry = registry
        self._bind()
        self._allocate(context)

    def with_tricks(
        self, registry: Registry | None = None, plan: DecodeGemmPlan | None = None, **changes: Any
    ) -> "Step":
        """Return a step on the same cache and inputs with other choices."""
        other = object.__new__(Step)
        other.__dict__.update(self.__dict__)
        other.tricks, other.registry = replace(self.tricks, **changes), registry or self.registry
        other.plan = plan or self.plan
        if not other.tricks.fused_silu:
            other.plan = replace(other.plan, fused_gate_up=False)
        other._bind()
        other._allocate_activations()
        return other

    def run(self) -> Tensor:
        model, source, previous = self.model, self.model.embed, None
        for i, layer in enumerate(model.layers):
            self._norm(source, layer.norm_attn, previous)
            self._product("qkv", layer, self.a8, self.a_scale, self.partial["qkv"])
            self._attention(i, layer)
            self._product("o", layer, self.o8, self._scale_o(layer), self.partial["o"])
            self._norm(self.partial["o"], layer.norm_mlp, ("o", layer, layer.scale_o))
            self._mlp(layer)
            source, previous = self.partial["down"], ("down", layer, layer.scale_mid)
        self._norm(source, model.norm, previous, quant=not self.tricks.bf16_head)
        self._head()
        self.argmax(self.logits, self.token, self.scratch)
        return self.token

    def _bind(self) -> None:
        plan, get = self.plan, self.registry.get
        self.pdl = self.tricks.pdl and plan.pdl
        pdl = partial(partial, pdl=self.pdl)
        self.gemm = {n: self._bind_gemm(n, *SHAPES[n]) for n in ("qkv", "o", "down")}
        self.gate_up = (
            self._bind_gemm("gate_up", *SHAPES["gate_up"])
            if not plan.fused_gate_up
            else self._own(get("gemm_gate_up", GateUpSpec(2 * INTER, HIDDEN, self._quant())))
        )
        head = GemmSpec(VOCAB, HIDDEN, skinny=plan.own_head)
        self.head = self._own(get("gemm_fp8", head)) if plan.own_head else get("gemm_fp8", head)
        fused = FusedAttnSpec(Q_HEADS, KV_HEADS, DIM, PAGE, self._quant(), plan.qkv_parts, plan.deferred)
        self.attention = pdl(get("attn_decode_fused", fused))
        self.rope = pdl(
            get("rope_append", RopeSpec(Q_HEADS, KV_HEADS, DIM, PAGE, "e4m3", plan.qkv_parts, plan.deferred))
        )
        self.attend = pdl(get("attn_decode", AttnSpec(Q_HEADS, KV_HEADS, DIM, PAGE)))
        self.quant_o = pdl(get("quant_fp8", QuantSpec(Q_HEADS * DIM, "tensor")))
        self.silu = pdl(get("silu_mul_quant", SiluSpec(INTER, "tensor", plan.deferred)))
        self.quant = pdl(get("quant_fp8", QuantSpec(HIDDEN)))
        self.argmax = pdl(get("argmax", QuantSpec(VOCAB, "none")))

    def _bind_gemm(self, name: str, n: int, k: int) -> Any:
        if self.plan.deferred:
            return self.registry.get("gemm_fp8", GemmSpec(n, k, deferred=True))
        recipe = "group" if self.tricks.group_scales and name in ("o", "down") else "row"
        return self._own(self.registry.get("gemm_fp8", GemmSpec(n, k, recipe, self.plan.parts(name), skinny=True)))

    def _quant(self) -> Quant:
        return "group" if self.tricks.group_scales else "tensor"

    def _own(self, op: Any) -> Any:
        """Bind the switches of our own products; those outside of `hopper` take only `pdl`."""
        if "hopper" in op.func.__module__:
            return partial(op, pdl=self.pdl, early=self.tricks.early, ahead=self.tricks.ahead)
        return partial(op, pdl=self.pdl)

    def _allocate(self, context: int) -> None:
        batch, pages = self.batch, -(-context // PAGE)
        total = batch * pages + 1
        shape = (2 * len(self.model.layers), total, KV_HEADS, PAGE, DIM)
        self.cache = torch.empty(shape, device=DEVICE, dtype=E4M3)  # one allocation has one stride between planes
        for plane in self.cache:
            plane.copy_(torch.randn(shape[1:], device=DEVICE, dtype=BF16).to(E4M3))
        order = torch.randperm(total - 1, device=DEVICE)[: batch * pages]
        self.block_table = order.to(torch.int32).view(batch, pages).contiguous()
        self.seq_lens = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)
        self.ids = torch.randint(0, VOCAB, (batch,), device=DEVICE)
        self._allocate_activations()

    def _allocate_activations(self) -> None:
        batch = self.batch

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=DEVICE)

        self.residual, self.normed = empty(batch, HIDDEN, dtype=BF16), empty(batch, HIDDEN, dtype=BF16)
        self.a8, self.a_scale = empty(batch, HIDDEN, dtype=E4M3), torch.full((batch,), 0.03, device=DEVICE)
        self.q, self.o16 = empty(batch, Q_HEADS, DIM, dtype=BF16), empty(batch, Q_HEADS, DIM, dtype=BF16)
        self.group_o, self.group_mid = empty(Q_HEADS, batch), empty(INTER // 128, batch)
        self.slots, self.positions = self._last_slots(), self.seq_lens - 1
        self.o8, self.mid8 = empty(batch, Q_HEADS * DIM, dtype=E4M3), empty(batch, INTER, dtype=E4M3)
        self.gate_up_out, self.logits = empty(batch, 2 * INTER, dtype=BF16), empty(batch, VOCAB, dtype=BF16)
        self.token = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
        self.workspace = torch.zeros(
            decode_workspace_nbytes(batch, KV_HEADS, 16, DIM), dtype=torch.uint8, device=DEVICE
        )
        self.scratch = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
        self.partial = {}
        for name in ("qkv", "o", "down"):
            parts = self.plan.parts(name)
            self.partial[name] = empty(parts, batch, SHAPES[name][0], dtype=torch.float32 if parts > 1 else BF16)

    def _last_slots(self) -> Tensor:
        """Return the slot of each sequence's newest token in the cache."""
        last = self.seq_lens.long() - 1
        page = self.block_table.gather(1, (last // PAGE)[:, None]).squeeze(1).long()
        return page * PAGE + last % PAGE

    def _scale_o(self, layer: Layer) -> Tensor:
        return self.group_o if self.tricks.group_scales else layer.scale_o

    def _scale_mid(self, layer: Layer) -> Tensor:
        return self.group_mid if self.tricks.group_scales else layer.scale_mid

    def _norm(self, x: Tensor, weight: Tensor, previous: Any, quant: bool = True) -> None:
        embed, tricks = previous is None, self.tricks
        name, layer, scale = previous or ("", self.model.layers[0], None)
        deferred = self.plan.deferred and not embed
        fused = tricks.fused_norm and quant
        quant_to: Quant = ("tensor" if tricks.static_norm else "token") if fused else "none"
        spec = NormSpec(HIDDEN, quant_to, self.plan.parts(name), deferred, embed)
        self.registry.get("add_rmsnorm_quant", spec)(
            x, self.residual, weight, EPS, self.a8 if fused else self.normed, self.a_scale,
            ids=self.ids if embed else None,
            token_scale=scale if deferred else None, channel_scale=layer.linears[name].scale if deferred else None,
            pdl=self.pdl, num_warps=tricks.norm_warps,
        )  # fmt: skip
        if quant and not fused:
            self.quant(self.normed, self.a8, self.a_scale)

    def _product(self, name: str, layer: Layer, x: Tensor, x_scale: Tensor, out: Tensor) -> None:
        linear = layer.linears[name]
        self.gemm[name](x, linear.weight, x_scale, linear.scale, out)

    def _attention(self, i: int, layer: Layer) -> None:
        k, v, qkv = self.cache[2 * i], self.cache[2 * i + 1], self.partial["qkv"]
        scales = {}
        if self.plan.deferred:
            scales = dict(token_scale=self.a_scale, channel_scale=layer.linears["qkv"].scale)
        if self.tricks.fused_attention:
            self.attention(
                qkv, k, v, self.block_table, self.seq_lens, self.model.cos_sin, self.o8, self._scale_o(layer),
                self.workspace, sm_scale=DIM**-0.5, **scales,
            )  # fmt: skip
        else:
            self.rope(qkv, self.positions, self.slots, self.model.cos_sin, self.q, k, v, **scales)
            self.attend(self.q, k, v, self.block_table, self.seq_lens, self.o16, self.workspace, sm_scale=DIM**-0.5)
            self.quant_o(self.o16.view(self.batch, -1), self.o8, layer.scale_o)

    def _mlp(self, layer: Layer) -> None:
        linear = layer.linears["gate_up"]
        if self.plan.fused_gate_up:
            self.gate_up(self.a8, linear.weight, self.a_scale, linear.scale, self.mid8, self._scale_mid(layer))
        else:
            self.gate_up(self.a8, linear.weight, self.a_scale, linear.scale, self.gate_up_out)
            scales = dict(token_scale=self.a_scale, channel_scale=linear.scale) if self.plan.deferred else {}
            self.silu(self.gate_up_out, self.mid8, layer.scale_mid, **scales)
        self._product("down", layer, self.mid8, self._scale_mid(layer), self.partial["down"])

    def _head(self) -> None:
        if self.tricks.bf16_head:
            torch.mm(self.normed, self.model.head_bf16.t(), out=self.logits)
        else:
            self.head(self.a8, self.model.head.weight, self.a_scale, self.model.head.scale, self.logits)


def floor_ms(batch: int) -> float:
    """Return the milliseconds to read what a step must: FP8 weights and head once, FP8 KV once."""
    weights = NUM_LAYERS * sum(n * k for n, k in SHAPES.values()) + VOCAB * HIDDEN
    cache = NUM_LAYERS * 2 * KV_HEADS * DIM * CONTEXT * batch
    return (weights + cache) / READ_RATE * 1e3


def check_replay(step: Step) -> bool:
    """Return whether eager execution, the graph and repeated replays give the same bits."""
    step.run()
    torch.cuda.synchronize()
    eager = step.logits.clone()
    graph = capture(step.run)
    for _ in range(3):
        step.logits.zero_()
        graph.replay()
        torch.cuda.synchronize()
        if not torch.equal(step.logits, eager):
            return False
    return True


def measure(step: Step) -> float:
    return replay_ms(capture(step.run), count=10, groups=5)


def variants(step: Step, registry: Registry) -> dict[str, Step]:
    """Return a step for each choice, with only that choice changed."""
    batch, change = step.batch, step.with_tricks
    rows = {
        "bf16_head": change(bf16_head=True),
        "no_pdl": change(pdl=False),
        "weights_after_wait": change(ahead=False),
        "late_trigger": change(early=False),
        "unfused_norm_quant": change(fused_norm=False),
        "norm_8_warps": change(norm_warps=8),
        "static_norm_scale": change(static_norm=True),
        "attention_apart": change(fused_attention=False),
        "unfused_silu": change(fused_silu=False),
    }
    if not step.plan.deferred:
        rows["group_scales"] = change(group_scales=True)
    if batch <= 32:
        rows["no_split_k"] = change(plan=replace(step.plan, qkv_parts=1, o_parts=1, down_parts=1))
        rows["cublas_deferred"] = change(plan=DecodeGemmPlan(deferred=True, own_head=step.plan.own_head))
        portable = Registry(
            registry.impls, registry.caps, override={"gemm_fp8": "triton_skinny", "gemm_gate_up": "triton"}
        )
        rows["portable_triton"] = change(registry=portable)
    elif batch <= 128:
        rows["own_gemm_everywhere" if step.plan.deferred else "cublas_deferred"] = change(
            plan=DecodeGemmPlan(1, 2, 2) if step.plan.deferred else DecodeGemmPlan(deferred=True)
        )
    else:
        rows["pdl_on"] = change(plan=replace(step.plan, pdl=True))
        rows["fused_gate_up"] = change(plan=replace(step.plan, fused_gate_up=True, pdl=True))
    return rows
