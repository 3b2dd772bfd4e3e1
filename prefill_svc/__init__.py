"""The prefill side of the handoff."""

from prefill_svc.role import PrefillRole as PrefillRole
