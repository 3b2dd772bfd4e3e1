"""The layout of a KV cache's bytes, which two workers compare before they move any."""

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Self

import msgspec

from contracts.errors import ConfigError, LayoutMismatch

ITEM_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
ROW_KINDS = ("draft_row", "state")
"""The kinds of groups that keep one row for a block, which belongs to its last token, and not one for each token."""
SPAN_KINDS = ("window", "segment")
"""The kinds of groups whose layers see a `span` of tokens."""
SHORT_KINDS = (*SPAN_KINDS, "state")
"""The kinds of groups whose pages are needed for a shorter time than their sequence lives."""


class KVGroup(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """The layers whose KV lies in pages of one form, with a block table of their own.

    A page is `[kv_heads, rows, head_dim]`. Each of the `layers` has the same `planes` of pages; the planes of the
    group are those of its first layer, in this order, then those of its second. `kind` says what the pages hold: "full"
    is the keys and values of every token, "latent" a row for each token that is key and value of all heads (multi-head
    latent attention), "window" those of layers that see the newest `span` tokens, "segment" those of layers that see
    what came since the last multiple of `span`, "draft" those of a draft head, "draft_row" the state with which a draft
    goes on behind a block, "state" that of recurrent layers behind a block's last token, or behind the newest one in
    the block that is being filled: only some blocks have such a page. `scales` says where quantization scales are kept
    ("none": not quantized). `weights` is the fingerprint of weights that are not the model's, such as a draft head's;
    empty if there are none.
    """

    kind: str = "full"
    layers: tuple[int, ...]
    planes: tuple[str, ...] = ("k", "v")
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    scales: str = "none"
    weights: str = ""
    span: int = 0

    @property
    def is_short(self) -> bool:
        """Return whether a sequence needs only the pages of its latest tokens."""
        return self.kind in SHORT_KINDS

    @property
    def is_state(self) -> bool:
        """Return whether a page is a state, of which only some blocks have one, and not keys and values."""
        return self.kind == "state"

    @property
    def is_optional(self) -> bool:
        """Return whether answers are the same without these pages, which belong to weights beside the model's."""
        return bool(self.weights)

    @property
    def are_keys(self) -> tuple[bool, ...]:
        """Return for each plane of a layer whether a codec takes it for keys: it meets queries."""
        return tuple(plane in ("k", "latent") for plane in self.planes)

    @property
    def rows(self) -> int:
        """Return the rows of `head_dim` values that a page has for each head."""
        return 1 if self.kind in ROW_KINDS else self.block_size

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_planes(self) -> int:
        return len(self.planes) * len(self.layers)

    def page_nbytes(self, tp_size: int) -> int:
        """Return the bytes of one block in one plane of one of `tp_size` shards."""
        return self.num_kv_heads // tp_size * self.rows * self.head_dim * ITEM_NBYTES[self.dtype]

    def shard_nbytes(self, tp_size: int) -> int:
        """Return the bytes of one block in all planes of one of `tp_size` shards."""
        return self.num_planes * self.page_nbytes(tp_size)

    @property
    def block_nbytes(self) -> int:
        """Return the bytes of one block in all planes of all shards."""
        return self.shard_nbytes(1)

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


class KVLayout(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """A paged cache of groups of layers.

    The cache lies in `tp_size` shards by KV heads. Each group has one allocation `[num_planes, num_blocks,
    page_nbytes]` in each shard: the shards' parts of a block in a plane, one after the other, are the page of a cache
    with one shard. Where more GPUs than KV heads share a cache, there are copies of each shard, which do not appear
    here; a latent, which has one head, is whole in each of them, and its layout has one shard.
    `model` is a fingerprint of configuration and weights, since the KV of one model means nothing to another.
    `rounding` names the number format in which weights and activations compute it, as `--dtype` does: pages of one form
    may come from several, each with values of its own.
    `block_size` is the number of tokens that the prefix cache hashes together, and at multiples of which prompts are
    cut into chunks; the block size of each group divides it, and is the same where its pages live shorter than a
    sequence. Optional groups stand behind the model's.

    Raises ValueError for no group, an optional one before another of the model's, a block size that is not divided by a
    group's, or a span that does not fit a group's kind.
    """

    model: str
    block_size: int
    groups: tuple[KVGroup, ...]
    tp_size: int = 1
    rounding: str = ""

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("a KV layout needs a group of layers")
        are_optional = [group.is_optional for group in self.groups]
        if are_optional != sorted(are_optional):
            raise ValueError(f"groups have weights of their own before the model's: {are_optional}")
        for index, group in enumerate(self.groups):
            if self.block_size % group.block_size:
                raise ValueError(f"groups[{index}].block_size is {group.block_size}; blocks are {self.block_size}")
            self._check_span(index, group)

    def _check_span(self, index: int, group: KVGroup) -> None:
        if (group.kind in SPAN_KINDS) != (group.span > 0):
            raise ValueError(f"groups[{index}].span is {group.span}; its kind is {group.kind}")
        if group.is_short and group.block_size != self.block_size:
            raise ValueError(f"groups[{index}].block_size is {group.block_size}; blocks are {self.block_size}")
        if group.kind == "segment" and group.span % self.block_size:
            raise ValueError(f"groups[{index}].span is {group.span}, not a multiple of blocks of {self.block_size}")

    @classmethod
    def uniform(
        cls,
        *,
        model: str,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: str,
        scales: str = "none",
        tp_size: int = 1,
        rounding: str = "",
        is_latent: bool = False,
    ) -> Self:
        """Return the layout of a model all of whose layers are one group, of full attention or of latents."""
        group = KVGroup(
            kind="latent" if is_latent else "full",
            planes=("latent",) if is_latent else ("k", "v"),
            layers=tuple(range(num_layers)),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            dtype=dtype,
            scales=scales,
        )
        return cls(model=model, block_size=block_size, groups=(group,), tp_size=tp_size, rounding=rounding)

    def with_groups(self, **changes: object) -> "KVLayout":
        """Return the layout with these fields of every group changed."""
        return msgspec.structs.replace(
            self, groups=tuple(msgspec.structs.replace(group, **changes) for group in self.groups)
        )

    def of_groups(self, indices: Iterable[int]) -> "KVLayout":
        """Return the layout of a cache that has only these of the groups."""
        return msgspec.structs.replace(self, groups=tuple(self.groups[index] for index in indices))

    @property
    def model_part(self) -> "KVLayout":
        """Return what two workers must have in common to hand KV over.

        It is the layout without its optional groups, and however weights are rounded: an answer may go on behind KV of
        another rounding, which is kept apart from one's own (contracts.kv_loss).
        """
        return _model_part_of(self)

    @property
    def only_group(self) -> KVGroup:
        """Return the group of a layout that has one. Raises ConfigError for one that has several."""
        if len(self.groups) != 1:
            kinds = ", ".join(group.kind for group in self.groups)
            raise ConfigError(f"this KV cache holds one group of layers; the layout has {len(self.groups)}: {kinds}")
        return self.groups[0]

    def group_nbytes(self, index: int) -> int:
        """Return the bytes of `block_size` tokens in one group, in all shards."""
        group = self.groups[index]
        return self.block_size // group.block_size * group.block_nbytes

    @property
    def shard_nbytes(self) -> int:
        """Return the bytes of `block_size` tokens in all groups of one shard."""
        return sum(self.block_size // group.block_size * group.shard_nbytes(self.tp_size) for group in self.groups)

    @property
    def block_nbytes(self) -> int:
        """Return the bytes of `block_size` tokens in all groups of all shards."""
        return self.tp_size * self.shard_nbytes

    @property
    def layout_id(self) -> str:
        return _digest_of(self)

    @property
    def shared_id(self) -> bytes:
        """Return 16 bytes that differ where the pages of equal tokens differ, whatever the number of shards.

        They cover the model, how it is rounded, and every group: layers, planes and their order, heads, format, scales,
        block size. With a block's chained hash they make its key (contracts.hashing.block_key).
        """
        return _shared_digest_of(self)

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def first_needed(self, index: int, num_tokens: int) -> int:
        """Return the first token whose pages in one group a continuation behind `num_tokens` tokens needs.

        It is at the edge of a block, and such that the last full block of these tokens can be continued behind as well;
        of a state it is the block whose page is the state behind these tokens. Every worker computes it: it says which
        pages of a prompt are kept, and which of them move.
        """
        group, end = self.groups[index], num_tokens // self.block_size * self.block_size
        match group.kind:
            case "window":
                return max(end - group.span + 1, 0) // self.block_size * self.block_size
            case "segment":
                return end // group.span * group.span
            case "state":
                return max(num_tokens - 1, 0) // self.block_size * self.block_size
            case _:
                return 0

    def skips(self, num_here: int, continues_at: int) -> list[int]:
        """Return for each group from which token on its pages move to who has those of `num_here` tokens.

        It goes on behind `continues_at` tokens, or more.
        """
        return [max(num_here, self.first_needed(index, continues_at)) for index in range(len(self.groups))]

    def most_blocks(self, index: int) -> int | None:
        """Return the most blocks whose pages in one group a sequence needs at once; None if it needs all.

        Of a state these are the last full block, behind which others may go on, and the one that is being filled.
        """
        group = self.groups[index]
        if not group.is_short:
            return None
        if group.is_state:
            return 2
        return -(-(group.span - 1) // self.block_size) + 1 if group.kind == "window" else group.span // self.block_size

    def difference(self, theirs: "KVLayout") -> tuple[str, object, object] | None:
        """Return the first field that differs, such as "groups[0].dtype", with its two values, or None.

        `rounding` is none of them: it makes no pages of another form.
        """
        if field := _first_difference(self, theirs, ("model", "block_size")):
            return field
        if len(self.groups) != len(theirs.groups):
            return "groups", [group.kind for group in self.groups], [group.kind for group in theirs.groups]
        for index, (ours, other) in enumerate(zip(self.groups, theirs.groups, strict=True)):
            if found := _first_difference(ours, other, KVGroup.__struct_fields__):
                return f"groups[{index}].{found[0]}", found[1], found[2]
        return _first_difference(self, theirs, ("tp_size",))

    def require_match(self, theirs: "KVLayout") -> None:
        """Raise LayoutMismatch with the first field that differs."""
        if found := self.difference(theirs):
            raise LayoutMismatch(*found)


def _first_difference(ours: object, theirs: object, fields: tuple[str, ...]) -> tuple[str, object, object] | None:
    pairs = ((name, getattr(ours, name), getattr(theirs, name)) for name in fields)
    return next((pair for pair in pairs if pair[1] != pair[2]), None)


@lru_cache(maxsize=64)
def _model_part_of(layout: KVLayout) -> KVLayout:
    needed = [index for index, group in enumerate(layout.groups) if not group.is_optional]
    return msgspec.structs.replace(layout.of_groups(needed), rounding="")


@lru_cache(maxsize=64)  # needed for each chunk, and a pool has few layouts
def _digest_of(layout: KVLayout) -> str:
    return hashlib.blake2b(_encoded(layout), digest_size=8).hexdigest()


@lru_cache(maxsize=64)
def _shared_digest_of(layout: KVLayout) -> bytes:
    whole = msgspec.structs.replace(layout, tp_size=1)
    return hashlib.blake2b(_encoded(whole), digest_size=16, person=b"kv layout").digest()


def _encoded(layout: KVLayout) -> bytes:
    """Return the bytes that stand for a layout; a span of 0 is left out, as there was none before."""
    fields: dict[str, Any] = msgspec.to_builtins(layout)
    groups: list[dict[str, Any]] = fields["groups"]
    kept = [{name: value for name, value in group.items() if name != "span" or value} for group in groups]
    return msgspec.json.encode(fields | {"groups": kept}, order="sorted")
