"""A reader of the part of JSON Schema that results.schema.json uses.

The schema file is the only source of the rules. This reader works wherever the benchmarks run, without a package; it
refuses keywords it does not know, so the schema can't outgrow it unnoticed, and a test holds it to `jsonschema`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import resources
from typing import Any

TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}
ANNOTATIONS = {"$schema", "$defs", "title", "description"}


def load() -> dict[str, Any]:
    """The schema of results.json."""
    text = resources.files(__name__).joinpath("results.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def _is(value: object, name: str) -> bool:
    if isinstance(value, bool) and name != "boolean":
        return False
    return isinstance(value, TYPES[name])


def violations(value: Any, schema: dict[str, Any], root: dict[str, Any] | None = None, at: str = "$") -> Iterator[str]:
    """Where a value breaks a schema.

    Args:
        value: Parsed JSON.
        schema: The schema or a part of it.
        root: The whole schema, where `$defs` are; the schema itself by default.
        at: Path of the value, for the messages.

    Yields:
        One sentence for each violation.

    Raises:
        ValueError: The schema uses a keyword that this reader does not know.
    """
    root = schema if root is None else root
    for keyword, rule in schema.items():
        if keyword in ANNOTATIONS:
            continue
        if keyword == "$ref":
            yield from violations(value, root["$defs"][rule.removeprefix("#/$defs/")], root, at)
        elif keyword == "type":
            names = [rule] if isinstance(rule, str) else rule
            if not any(_is(value, n) for n in names):
                yield f"{at}: {value!r} is not of type {' or '.join(names)}"
        elif keyword == "const":
            if value != rule or isinstance(value, bool) != isinstance(rule, bool):
                yield f"{at}: {value!r} is not {rule!r}"
        elif keyword == "enum":
            if value not in rule:
                yield f"{at}: {value!r} is none of {', '.join(map(repr, rule))}"
        elif keyword in ("properties", "required", "additionalProperties"):
            if isinstance(value, dict):
                yield from _object(value, keyword, rule, schema, root, at)
        elif keyword in ("items", "minItems", "maxItems"):
            if isinstance(value, list):
                yield from _array(value, keyword, rule, root, at)
        elif keyword in ("minimum", "exclusiveMinimum"):
            if _is(value, "number") and (value < rule if keyword == "minimum" else not value > rule):
                yield f"{at}: {value!r} is below the {keyword} {rule}"
        elif keyword in ("pattern", "minLength"):
            bad = isinstance(value, str) and (
                re.search(rule, value) is None if keyword == "pattern" else len(value) < rule
            )
            if bad:
                yield f"{at}: {value!r} breaks {keyword} {rule}"
        else:
            raise ValueError(f"schema keyword {keyword!r} at {at} is not supported by this reader")


def _object(
    value: dict[str, Any], keyword: str, rule: Any, schema: dict[str, Any], root: dict[str, Any], at: str
) -> Iterator[str]:
    if keyword == "required":
        for name in rule:
            if name not in value:
                yield f"{at}: {name!r} is missing"
    elif keyword == "properties":
        for name, part in rule.items():
            if name in value:
                yield from violations(value[name], part, root, f"{at}.{name}")
    else:
        for name in value.keys() - schema.get("properties", {}).keys():
            if rule is False:
                yield f"{at}: {name!r} is not allowed"
            else:
                yield from violations(value[name], rule, root, f"{at}.{name}")


def _array(value: list[Any], keyword: str, rule: Any, root: dict[str, Any], at: str) -> Iterator[str]:
    if keyword == "items":
        for i, item in enumerate(value):
            yield from violations(item, rule, root, f"{at}[{i}]")
    elif (len(value) < rule) if keyword == "minItems" else (len(value) > rule):
        yield f"{at}: {len(value)} items break {keyword} {rule}"
