"""A paged KV manager."""

from __future__ import annotations

from pluglm.kv.paged import PagedKV


class HashPrefixKV(PagedKV):
    """Paged."""
