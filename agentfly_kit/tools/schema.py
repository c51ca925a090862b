"""Conversion of function signatures to JSON schemas and of JSON values to arguments."""

from __future__ import annotations

import copy
import inspect
import json
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union

import docstring_parser
from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from agentfly_kit._display import shorten
from agentfly_kit.errors import ToolSchemaError
from agentfly_kit.types import drop_none

REQUIRED: Any = inspect.Parameter.empty


def parse_docstring(text: str | None, owner: str) -> tuple[str, dict[str, str]]:
    """Parse a Google, NumPy or Sphinx docstring. Return the descriptions of `owner` and of its parameters."""
    try:
        parsed = docstring_parser.parse(text or "")
    except docstring_parser.ParseError as error:
        raise ToolSchemaError(f"the docstring of {owner} cannot be parsed: {error}") from None
    parts = [part.strip() for part in (parsed.short_description, parsed.long_description) if part]
    return "\n\n".join(parts), {p.arg_name: " ".join((p.description or "").split()) for p in parsed.params}


class Parameter(NamedTuple):
    """Parameter of a tool as seen by the model. Unlike in `inspect.Parameter`, the name may be any string."""

    name: str
    annotation: Any
    default: Any = REQUIRED


class Arguments:
    """Visible parameters of the function `owner`. This class generates their JSON schema and validates JSON values.

    A description in an annotation takes precedence over one in the docstring. With `optional`, parameters do not need a
    description. If `schema` is given, it is used unchanged.
    """

    def __init__(
        self,
        owner: str,
        parameters: Sequence[inspect.Parameter | Parameter],
        documented: Mapping[str, str],
        optional: bool = False,
        schema: dict[str, Any] | None = None,
    ) -> None:
        self.owner = owner
        self.parameters = {p.name: p for p in parameters}
        self._adapters = {p.name: self._adapter(p) for p in parameters}
        self.schema = self._generate_schema(parameters, documented, optional) if schema is None else schema

    @classmethod
    def from_schema(cls, owner: str, schema: Any) -> Arguments:
        """Create an instance from the JSON schema of an object. Only names and types of arguments will be validated."""
        properties = schema.get("properties", {}) if isinstance(schema, Mapping) else None
        if not isinstance(properties, Mapping) or schema.get("type", "object") != "object":
            raise ToolSchemaError(
                f"{owner}: schema must be the JSON schema of an object, such as {{'type': 'object', 'properties': "
                f"{{'city': {{'type': 'string'}}}}}}, got {schema!r:.80}"
            )
        required = schema.get("required", ())
        try:
            json.dumps(schema)
            parameters = [
                Parameter(str(name), _annotation(part), REQUIRED if name in required else None)
                for name, part in properties.items()
            ]
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ToolSchemaError(f"{owner}: schema must be a JSON schema, got {schema!r:.80} ({error})") from None
        whole = {"type": "object", **schema, "properties": dict(properties)}
        return cls(owner, parameters, {}, schema=copy.deepcopy(whole))

    def _generate_schema(
        self, parameters: Sequence[inspect.Parameter | Parameter], documented: Mapping[str, str], optional: bool
    ) -> dict[str, Any]:
        owner = self.owner
        # Generate all schemas in one call, so that different classes with the same name get different keys in $defs.
        schemas, shared = TypeAdapter.json_schemas([(n, "validation", a) for n, a in self._adapters.items()])
        properties: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            entry = dict(schemas[(name, "validation")])
            description = _description_in(parameter.annotation) or documented.get(name)
            if description:
                entry["description"] = description
            elif not optional:
                others = f" (the docstring describes {', '.join(map(repr, documented))})" if documented else ""
                raise ToolSchemaError(
                    f"{owner}: parameter {name!r} must have a description{others}; add to the docstring\n\n"
                    f"    Args:\n        {name}: description for the model\n\n"
                    "or allow descriptions to be missing while prototyping:\n\n    @af.tool(describe='optional')"
                )
            if parameter.default is not REQUIRED and parameter.default is not None:
                entry["default"] = self._json_default(parameter)
            properties[name] = entry
        root: dict[str, Any] = {"type": "object", "properties": properties}
        if required := [p.name for p in parameters if p.default is REQUIRED]:
            root["required"] = required
        return _simplify(root, shared.get("$defs", {}))

    def _adapter(self, parameter: inspect.Parameter | Parameter) -> TypeAdapter[Any]:
        name, annotation = parameter.name, parameter.annotation
        if annotation is REQUIRED:
            raise ToolSchemaError(f"{self.owner}: parameter {name!r} must have a type, for example {name}: str")
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(annotation)
            adapter.json_schema()
        except (PydanticSchemaGenerationError, PydanticUserError, TypeError, NameError, RecursionError) as error:
            raise ToolSchemaError(
                f"{self.owner}: parameter {name!r} must have a type with a JSON schema, got "
                f"{inspect.formatannotation(annotation)} ({str(error).splitlines()[0]})\n"
                "Use another type, or hide the parameter from the model: af.FromTask[...] for a task field, a sandbox "
                "class, or af.Context"
            ) from None
        return adapter

    def _json_default(self, parameter: inspect.Parameter | Parameter) -> Any:
        try:
            value = self._adapters[parameter.name].dump_python(parameter.default, mode="json", warnings="error")
            return json.loads(json.dumps(value, allow_nan=False))
        except Exception:
            raise ToolSchemaError(
                f"{self.owner}: the default of parameter {parameter.name!r} must be a JSON value of its type, got "
                f"{parameter.default!r}; use {inspect.formatannotation(parameter.annotation)} | None = None"
            ) from None

    def validate(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Convert JSON values to arguments. Return (arguments, ""), or ({}, message for the model) if this fails."""
        values: dict[str, Any] = {}
        problems: list[str] = []
        for name, parameter in self.parameters.items():
            if name not in given:
                if parameter.default is REQUIRED:
                    problems.append(f"{name} is missing")
                continue  # the default applies
            try:
                values[name] = self._adapters[name].validate_python(given[name])
            except ValidationError as error:
                # Models write null for values that they do not need, so use the default, also inside objects.
                if given[name] is None and parameter.default is not REQUIRED:
                    continue
                try:
                    values[name] = self._adapters[name].validate_python(drop_none(given[name]))
                except ValidationError:
                    problems += _validation_messages(name, error)
        problems += [f"{name} is not a parameter" for name in given if name not in self.parameters]
        if not problems:
            return values, ""
        return {}, f"{self.owner} was not run: {'; '.join(problems)}. It takes {self.signature}"

    @property
    def signature(self) -> str:
        """Signature with JSON types for the model, such as `(expression: string, digits: integer = 2)`."""
        texts = []
        for name, entry in self.schema["properties"].items():
            end = "" if self.parameters[name].default is REQUIRED else f" = {json.dumps(entry.get('default'))}"
            texts.append(f"{name}: {type_name(entry)}{end}")
        return f"({', '.join(texts)})"


# Python type for each JSON type. "number" also accepts integers, so that they are not converted to floats.
_TYPES: dict[str, Any] = {
    "string": str, "integer": int, "number": int | float, "boolean": bool, "array": list, "object": dict, "null": None,
}  # fmt: skip


def _annotation(part: Mapping[str, Any]) -> Any:
    """Return the Python type that corresponds to a part of a JSON schema, or Any if it is unknown."""
    if "enum" in part or "const" in part:
        values = part.get("enum", [part.get("const")])
        return Literal[tuple(values)] if all(isinstance(v, str | int | None) for v in values) else Any
    kinds = part.get("anyOf") or part.get("oneOf")
    if kinds or isinstance(part.get("type"), list):
        return Union[tuple(_annotation(kind) for kind in kinds or [{**part, "type": t} for t in part["type"]])]  # noqa: UP007
    if part.get("type") == "array" and isinstance(part.get("items"), Mapping):
        return list[_annotation(part["items"])]  # type: ignore[misc]
    values = part.get("additionalProperties")
    if part.get("type") == "object" and isinstance(values, Mapping) and not part.get("properties"):
        return dict[str, _annotation(values)]  # type: ignore[misc]
    return _TYPES.get(part.get("type", ""), Any)


def _validation_messages(name: str, error: ValidationError) -> list[str]:
    found = []
    for item in error.errors(include_url=False, include_context=False):
        where = ".".join([name, *(str(part) for part in item["loc"])])
        found.append(f"{where}: {item['msg'][0].lower()}{item['msg'][1:]} (got {shorten(repr(item['input']), 60)})")
    return found


def _description_in(annotation: Any) -> str | None:
    """Return the description from `Annotated[int, "..."]` or `Annotated[int, Field(description="...")]`, or None."""
    if typing.get_origin(annotation) is not Annotated:
        return None
    for extra in annotation.__metadata__:
        if isinstance(extra, str):
            return extra
        if isinstance(extra, FieldInfo) and extra.description:
            return extra.description
    return None


def _simplify(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Remove titles and replace each $ref with its definition. Definitions that contain recursive types stay in $defs.

    Titles generated by Pydantic only repeat the names and would waste tokens in every prompt.
    """
    schema = _rewrite({**schema, "$defs": definitions}, {})
    while inlined := {name: d for name, d in schema["$defs"].items() if '"$ref"' not in json.dumps(d)}:
        schema["$defs"] = {name: d for name, d in schema["$defs"].items() if name not in inlined}
        schema = _rewrite(schema, inlined)
    if not schema["$defs"]:
        del schema["$defs"]
    return schema


def _rewrite(part: Any, definitions: Mapping[str, Any]) -> Any:
    """Return a copy without titles in which each $ref to an entry of `definitions` is replaced with that entry."""
    if isinstance(part, list):
        return [_rewrite(each, definitions) for each in part]
    if not isinstance(part, dict):
        return part
    name = part.get("$ref", "").removeprefix("#/$defs/")
    out: dict[str, Any] = dict(definitions.get(name, {}))
    for key, value in part.items():
        if key in ("properties", "$defs", "patternProperties"):  # keys are user-defined names, possibly "title"
            out[key] = {chosen: _rewrite(each, definitions) for chosen, each in value.items()}
        elif key in ("default", "const", "enum", "examples"):
            out[key] = value
        elif not (key == "title" or (key == "$ref" and name in definitions)):
            out[key] = _rewrite(value, definitions)
    return out


def type_name(entry: Mapping[str, Any]) -> str:
    """Return a short name for the type described by a JSON schema."""
    if "enum" in entry or "const" in entry:
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in entry.get("enum", [entry.get("const")]))
    if "anyOf" in entry:
        return " | ".join(type_name(part) for part in entry["anyOf"])
    if entry.get("type") == "array" and isinstance(entry.get("items"), dict):
        return f"array of {type_name(entry['items'])}"
    kinds = entry.get("type", "object" if "$ref" in entry else "any")
    return " | ".join(kinds) if isinstance(kinds, list) else str(kinds)
