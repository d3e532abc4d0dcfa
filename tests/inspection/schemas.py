"""The JSON schemas of the package, and what in a value is not as one says."""

import functools
import json
from pathlib import Path

import spmd

FOLDER = Path(spmd.__file__).parent / "inspection"


@functools.cache
def schema_of(name):
    """A schema, all of whose references name their file."""
    return absolute(json.loads((FOLDER / name).read_text(encoding="utf-8")), name)


def absolute(schema, name):
    """A part of a schema with the name of its file in its references."""
    if isinstance(schema, list):
        return [absolute(one, name) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: absolute(inner, name) for key, inner in schema.items()}
    ref = schema.get("$ref", "")
    return found | {"$ref": name + ref} if ref.startswith("#") else found


def referred(ref):
    """What a reference stands for: a whole file, or one of its definitions."""
    name, _, place = ref.partition("#/$defs/")
    return schema_of(name)["$defs"][place] if place else schema_of(name)


def faults(value, schema, path="$"):
    """Where a value breaks a JSON Schema, for the keywords that ours uses and no other."""
    assert schema.keys() <= {"description", "title", "$schema", "$defs"} | CHECKS.keys()
    return [
        fault if fault.startswith("$") else f"{path}: {fault}"
        for keyword, check in CHECKS.items()
        if keyword in schema
        for fault in check(value, schema[keyword], path)
    ]


TYPES = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
    "null": lambda v: v is None,
}


def check_type(value, types, path):
    """A type, or one of several."""
    types = [types] if isinstance(types, str) else types
    return [] if any(TYPES[name](value) for name in types) else [f"{value!r} is none of {types}"]


def check_properties(value, schemas, path):
    """The keys that a schema names, where they are there."""
    pairs = value.items() if isinstance(value, dict) else ()
    return [f for k, v in pairs if k in schemas for f in faults(v, schemas[k], f"{path}.{k}")]


def check_others(value, schema, path):
    """All keys, in objects that are maps: ours name no keys then."""
    pairs = value.items() if isinstance(value, dict) else ()
    return [fault for k, v in pairs for fault in faults(v, schema, f"{path}.{k}")]


def check_items(value, schema, path):
    """Each element of an array."""
    items = enumerate(value) if isinstance(value, list) else ()
    return [fault for i, item in items for fault in faults(item, schema, f"{path}[{i}]")]


CHECKS = {
    "type": check_type,
    "const": lambda v, one, path: [f"{v!r} is not {one!r}"] * (v != one),
    "enum": lambda v, all_, path: [f"{v!r} is none of {all_}"] * (v not in all_),
    "minimum": lambda v, least, path: ["too small"] * (TYPES["number"](v) and v < least),
    "required": lambda v, ks, path: [f"no {k}" for k in ks if isinstance(v, dict) and k not in v],
    "properties": check_properties,
    "additionalProperties": check_others,
    "items": check_items,
    "allOf": lambda v, schemas, path: [f for s in schemas for f in faults(v, s, path)],
    "anyOf": lambda v, schemas, path: min((faults(v, s, path) for s in schemas), key=len),
    "$ref": lambda v, ref, path: faults(v, referred(ref), path),
}


def undocumented(value, schema, path="$"):
    """Keys that are written and that the schema does not name."""
    if isinstance(value, list):
        return [f for v in value for f in undocumented(v, together(schema)["items"], path)]
    schema = together(schema)
    if not isinstance(value, dict) or "additionalProperties" in schema:
        return []
    named = schema["properties"]
    found = [f"{path}.{key}" for key in value if key not in named]
    pairs = [(key, inner) for key, inner in value.items() if key in named]
    return found + [f for k, v in pairs for f in undocumented(v, named[k], f"{path}.{k}")]


def together(schema):
    """A schema with what it refers to in place; of a value or null, that of the value."""
    if "$ref" in schema:
        return together(referred(schema["$ref"]))
    if "anyOf" in schema:
        return together(schema["anyOf"][0])
    parts = [together(part) for part in schema.get("allOf", ())]
    named = {key: inner for part in parts for key, inner in part["properties"].items()}
    return {"properties": named} if parts else schema
