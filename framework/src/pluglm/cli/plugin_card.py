"""`pluglm plugins show`: one component, imported and described."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from pluglm.assembly.locating import locate
from pluglm.assembly.registry import Entry, load
from pluglm.assembly.resolving import SLOTS
from pluglm.cli import exits
from pluglm.cli.plugin_list import require_kind
from pluglm.cli.terminal import new_table, print_on
from pluglm.cli.yaml_line import one_line_yaml
from pluglm.kernel.errors import PluginError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from rich.console import RenderableType
    from rich.table import Table


def print_plugin(kind: str, name: str) -> int:
    """Its card on stdout. A component that cannot be loaded is a card with its error, and exit code 2."""
    require_kind(kind)
    entry = locate(SLOTS.get(kind, (kind,)), name, None)
    rows = list(_origin(entry))
    try:
        cls = load(entry)
    except PluginError as error:
        print_on(sys.stdout, _card([*rows, ("broken", str(error))]))
        return exits.BAD_INPUT
    config = getattr(cls, "Config", None)
    print_on(sys.stdout, _card([*rows, *_class_rows(cls)]), *(_keys(config) if config is not None else ()))
    return exits.DONE


def _origin(entry: Entry) -> Iterator[tuple[str, str]]:
    yield "component", f"{entry.kind} '{entry.name}'"
    yield "package", f"{entry.distribution} {entry.version}" if entry.distribution else "none: a loose file or module"
    yield "class", entry.target


def _class_rows(cls: type[Any]) -> Iterator[tuple[str, str]]:
    yield "interface", f"version {cls.interface_version}"
    if paragraph := _first_paragraph(cls.__doc__):
        yield "about", paragraph
    if hasattr(cls, "capabilities") and hasattr(cls, "Config"):
        yield from _capability_rows(cls)


def _capability_rows(cls: type[Any]) -> Iterator[tuple[str, str]]:
    """What it declares with the default config, if there is one."""
    try:
        found = cls.capabilities(cls.Config())
    except ValidationError:
        yield "capabilities", "depend on its keys, some of which have no default"
        return
    except Exception as error:  # the plugin's own code
        yield "capabilities", f"raised {type(error).__name__}: {' '.join(str(error).split())}"
        return
    yield "provides", ", ".join(sorted(found.provides)) or "nothing beyond its slot"
    for word, tags in (("needs", found.needs), ("refuses", found.refuses)):
        for tag, reason in tags.items():
            yield word, f"{tag}: {reason}"


def _first_paragraph(doc: str | None) -> str:
    return " ".join(inspect.cleandoc(doc or "").partition("\n\n")[0].split())


def _card(rows: list[tuple[str, str]]) -> Table:
    table = new_table(None, "", "")
    table.show_header = False
    for name, value in rows:
        table.add_row(name, value)
    return table


def _keys(config: type[BaseModel]) -> Iterator[RenderableType]:
    """A table of the keys, then what the config class says about them."""
    if not config.model_fields:
        yield "It takes no keys."
        return
    described = any(field.description for field in config.model_fields.values())
    table = new_table("keys", "key", "type", "default", *(["meaning"] if described else []))
    for name, field in config.model_fields.items():
        table.add_row(name, type_text(field), _default_text(field), *([field.description or ""] if described else []))
    yield table
    if doc := _own_doc(config):
        yield doc


def _own_doc(config: type[BaseModel]) -> str:
    """The whole docstring of the config class itself, which is where the keys are explained."""
    return inspect.cleandoc(vars(config).get("__doc__") or "")


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    return one_line_yaml(TypeAdapter(Any).dump_python(default, mode="json", fallback=repr))


def type_text(field: FieldInfo) -> str:
    """The field's type and its limits, such as `int, >= 1`."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "min_length": "length >=", "max_length": "length <="}
    limits = [
        f"{sign} {getattr(one, attribute)}"
        for one in field.metadata
        for attribute, sign in signs.items()
        if hasattr(one, attribute)
    ]
    return ", ".join([_type_name(field.annotation), *limits])


def _type_name(annotation: Any) -> str:
    """A type as one writes it, without modules and annotations."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(_type_name(one) for one in arguments)
    if origin is Literal:
        return " | ".join(repr(one) for one in arguments)
    if arguments:
        return f"{_type_name(origin)}[{', '.join(_type_name(one) for one in arguments)}]"
    if annotation in (None, NoneType, Ellipsis):
        return "..." if annotation is Ellipsis else "None"
    return str(getattr(annotation, "__name__", annotation))
