"""`pluglm plugins`: a listing that imports nothing, and a card that shows a broken component as a row."""

from __future__ import annotations

import json
import subprocess
import sys

LISTING = """
import json, sys
sys.argv = ["pluglm", "plugins", "list"] + sys.argv[1:]
from pluglm.cli.main import main
try:
    main()
except SystemExit as ended:
    json.dump({"code": ended.code, "modules": sorted(sys.modules)}, sys.stderr)
"""


def test_listing_imports_neither_torch_nor_any_plugin():
    for options in ([], ["--json"]):
        ended = subprocess.run([sys.executable, "-c", LISTING, *options], capture_output=True, text=True, check=True)
        result = json.loads(ended.stderr)
        assert result["code"] == 0
        assert "NaiveAttention" in ended.stdout
        heavy = {"torch", "numpy", "jinja2", "tokenizers", "transformers", "gguf", "safetensors"}
        assert heavy.isdisjoint(result["modules"])
        ours = {one for one in result["modules"] if one.startswith("pluglm") and not one.startswith("pluglm.cli")}
        assert ours == {
            "pluglm",
            "pluglm.kernel",
            "pluglm.kernel.errors",
            "pluglm.assembly",
            "pluglm.assembly.registry",
        }


def test_a_policy_is_found_under_the_name_of_its_slot(pluglm):
    card = pluglm("plugins", "show", "scheduler", "priority")
    assert card.code == 0
    assert "pluglm_schedulers.priority:PriorityPolicy" in card.out


def test_json_rows_say_what_package_metadata_says(pluglm):
    rows = json.loads(pluglm("plugins", "list", "--kind", "kv", "--json").out)
    assert [(row["kind"], row["name"], row["distribution"], row["class"], row["state"]) for row in rows] == [
        ("kv", "contiguous", "pluglm", "pluglm.kv.contiguous:ContiguousKV", "not loaded"),
        ("kv", "hash_prefix", "pluglm-prefix-cache", "pluglm_prefix_cache.hash_prefix:HashPrefixKV", "not loaded"),
        ("kv", "paged", "pluglm", "pluglm.kv.paged:PagedKV", "not loaded"),
        ("kv", "radix", "pluglm-prefix-cache", "pluglm_prefix_cache.radix:RadixKV", "not loaded"),
        ("kv", "window_paged", "pluglm", "pluglm.kv.window_paged:WindowPagedKV", "not loaded"),
    ]


def test_a_broken_package_is_a_row_until_it_is_checked(pluglm, plugin_package):
    plugin_package("brokenkv", "[pluglm.kv]\nsplintered = brokenkv_module:KV\n", "raise OSError('no libsplinter')")
    plain = pluglm("plugins", "list", "--kind", "kv")
    assert plain.code == 0
    assert "brokenkv_module:KV" in plain.out
    checked = pluglm("plugins", "list", "--kind", "kv", "--check", "--json")
    assert checked.code == 2
    states = {row["name"]: row["state"] for row in json.loads(checked.out)}
    sound = ("contiguous", "hash_prefix", "paged", "radix", "window_paged")
    assert states == {**dict.fromkeys(sound, "ok"), "splintered": "broken"}
    table = pluglm("plugins", "list", "--kind", "kv", "--check").out
    assert "OSError: no libsplinter" in table


def test_a_name_claimed_twice_is_noted_with_what_to_write(pluglm, plugin_package):
    plugin_package("rival", "[pluglm.kv]\npaged = pluglm.kv.paged:PagedKV\n", "")
    out = pluglm("plugins", "list", "--kind", "kv").out
    assert "write rival:paged" in out
    assert "write pluglm:paged" in out


def test_every_installed_component_is_sound(pluglm):
    outcome = pluglm("plugins", "list", "--check", "--json")
    assert [row["note"] for row in json.loads(outcome.out) if row["state"] != "ok"] == []
    assert outcome.code == 0


def test_a_card_shows_keys_types_limits_and_capabilities(pluglm):
    out = pluglm("plugins", "show", "kv", "paged").out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "class pluglm.kv.paged:PagedKV" in lines
    assert "interface version 2" in lines
    assert "block_size int, >= 1 16" in lines
    assert "num_blocks int | None, >= 1 null" in lines
    card = pluglm("plugins", "show", "backend", "fake").out
    assert "numerics:batch_invariant" in card
    assert "slot:quantizer: it computes no weights" in card


def test_every_installed_component_has_a_card(pluglm):
    for row in json.loads(pluglm("plugins", "list", "--json").out):
        outcome = pluglm("plugins", "show", row["kind"], row["name"])
        assert outcome.code == 0, row
        assert row["class"] in outcome.out


def test_a_key_without_a_default_is_required(pluglm):
    lines = [" ".join(line.split()) for line in pluglm("plugins", "show", "hooks", "events").out.splitlines()]
    assert "path Path required" in lines


def test_a_broken_component_is_a_card_with_its_error_and_exit_2(pluglm, plugin_package):
    plugin_package("oldkv", "[pluglm.kv]\nancient = oldkv_module:KV\n", "class KV:\n    interface_version = 0\n")
    outcome = pluglm("plugins", "show", "kv", "ancient")
    assert outcome.code == 2
    assert "oldkv 1.0" in outcome.out
    assert "is written for kv interface 0" in outcome.out
    assert outcome.err == ""
