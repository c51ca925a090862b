"""Conversion of function signatures to JSON schemas, and of JSON values to arguments."""

from __future__ import annotations

import copy
import inspect
import json
import sys
import types as pytypes
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import docstring_parser
import typing_extensions
from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.fields import FieldInfo

from agentfly_kit.errors import ToolSchemaError

REQUIRED: Any = inspect.Parameter.empty


@dataclass(frozen=True)
class Parameter:
    """Parameter that the model provides."""

    name: str
    annotation: Any
    description: str
    default: Any = REQUIRED


def parse_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the description of a function and of each parameter from a Google, NumPy or Sphinx docstring.

    Raises:
        ToolSchemaError: if the docstring cannot be parsed.
    """
    try:
        parsed = docstring_parser.parse(inspect.getdoc(function) or "")
    except docstring_parser.ParseError as error:
        raise ToolSchemaError(f"the docstring of {function.__name__} cannot be parsed: {error}") from None
    parts = [part.strip() for part in (parsed.short_description, parsed.long_description) if part]
    return "\n\n".join(parts), {p.arg_name: " ".join((p.description or "").split()) for p in parsed.params}


class Arguments:
    """Visible parameters of one function, with their JSON schema and the validation of JSON values.

    Raises:
        ToolSchemaError: if a type or default has no JSON representation.
    """

    def __init__(self, owner: str, parameters: Sequence[Parameter]) -> None:
        self.owner = owner
        self.parameters = {p.name: p for p in parameters}
        self._adapters = {p.name: _adapter(owner, p) for p in parameters}
        self.schema = self._make_schema()

    def _make_schema(self) -> dict[str, Any]:
        for name, adapter in self._adapters.items():
            try:
                adapter.json_schema()
            except PydanticInvalidForJsonSchema as error:
                raise ToolSchemaError(
                    f"{self.owner}: parameter {name!r} has a type without a JSON representation "
                    f"({str(error).splitlines()[0]}); use a JSON-compatible type"
                ) from None
        # In one call, so that classes with the same name in different parameters get different definitions.
        by_name, shared = TypeAdapter.json_schemas([(n, "validation", a) for n, a in self._adapters.items()])
        properties: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            entry = dict(by_name[(name, "validation")])
            entry["description"] = parameter.description
            if parameter.default is not REQUIRED and parameter.default is not None:
                entry["default"] = self._json_default(parameter)
            properties[name] = entry
        root: dict[str, Any] = {"type": "object", "properties": properties}
        if required := [p.name for p in self.parameters.values() if p.default is REQUIRED]:
            root["required"] = required
        untitled = _strip_titles({**root, "$defs": shared.get("$defs", {})})
        return _inline_refs(untitled)

    def _json_default(self, parameter: Parameter) -> Any:
        try:
            value = self._adapters[parameter.name].dump_python(parameter.default, mode="json", warnings="error")
            return json.loads(json.dumps(value, allow_nan=False))
        except Exception:
            raise ToolSchemaError(
                f"{self.owner}: parameter {parameter.name!r} has the default {parameter.default!r}, which is not a "
                f"JSON value of its type; change it, or use {_type_repr(parameter.annotation)} | None = None"
            ) from None

    def validate(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Convert JSON values to arguments.

        Returns:
            The arguments and "", or {} and a message for the model that lists all problems.
        """
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
                problems += _validation_messages(name, error)
        problems += [f"{name} is not an argument" for name in given if name not in self.parameters]
        if not problems:
            return values, ""
        return {}, f"{self.owner} was not run: {'; '.join(problems)}. It takes {self.signature}"

    @property
    def signature(self) -> str:
        """Signature in terms of JSON types, for the model: `(expression: string, digits: integer = 2)`."""
        texts = []
        for name, entry in self.schema["properties"].items():
            end = "" if self.parameters[name].default is REQUIRED else f" = {json.dumps(entry.get('default'))}"
            texts.append(f"{name}: {_type_name(entry)}{end}")
        return f"({', '.join(texts)})"


def _adapter(owner: str, parameter: Parameter) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(_for_pydantic(parameter.annotation))
    except (PydanticSchemaGenerationError, PydanticUserError, TypeError, NameError, RecursionError) as error:
        raise ToolSchemaError(
            f"{owner}: parameter {parameter.name!r} has the type {_type_repr(parameter.annotation)}, which has no JSON "
            f"schema ({str(error).splitlines()[0]}); use a JSON-compatible type, or hide it from the model: "
            f"af.FromTask[...] for a task field, a sandbox class, or af.Context"
        ) from None


def _validation_messages(name: str, error: ValidationError) -> list[str]:
    found = []
    for item in error.errors(include_url=False, include_context=False):
        where = ".".join([name, *(str(part) for part in item["loc"])])
        given = repr(item["input"])
        given = given if len(given) <= 60 else given[:57] + "..."
        found.append(f"{where}: {item['msg'][0].lower()}{item['msg'][1:]} (got {given})")
    return found


def description_in(annotation: Any) -> str | None:
    """Return the description in `Annotated[int, "..."]` or `Annotated[int, Field(description="...")]`."""
    if typing.get_origin(annotation) is not Annotated:
        return None
    for extra in annotation.__metadata__:
        if isinstance(extra, str):
            return extra
        if isinstance(extra, FieldInfo) and extra.description:
            return extra.description
    return None


# --- schemas -------------------------------------------------------------------------------------


def _strip_titles(schema: Any) -> Any:
    """Remove the titles that pydantic adds: they repeat the names and cost tokens in every prompt."""
    if isinstance(schema, list):
        return [_strip_titles(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out = {}
    for key, value in schema.items():
        if key == "title" and isinstance(value, str):
            continue
        if key in ("properties", "$defs", "patternProperties"):  # keys are names chosen by the user, possibly "title"
            out[key] = {name: _strip_titles(part) for name, part in value.items()}
        elif key in ("default", "const", "enum", "examples"):
            out[key] = value
        else:
            out[key] = _strip_titles(value)
    return out


def _inline_refs(root: dict[str, Any]) -> dict[str, Any]:
    """Replace each $ref by its definition. Recursive types stay in $defs and keep their $refs."""
    definitions: dict[str, Any] = root.pop("$defs", {})
    kept: set[str] = set()

    def reaches(name: str, goal: str, seen: set[str]) -> bool:
        inner = {ref for ref in _refs(definitions[name]) if ref not in seen}
        return goal in _refs(definitions[name]) or any(reaches(ref, goal, seen | inner) for ref in inner)

    recursive = {name for name in definitions if reaches(name, name, {name})}

    def replace(part: Any) -> Any:
        if isinstance(part, list):
            return [replace(p) for p in part]
        if not isinstance(part, dict):
            return part
        rest = {key: replace(value) for key, value in part.items() if key != "$ref"}
        if "$ref" not in part:
            return rest
        name = part["$ref"].removeprefix("#/$defs/")
        if name in recursive:
            kept.add(name)
            return {"$ref": part["$ref"], **rest}
        return {**replace(copy.deepcopy(definitions[name])), **rest}

    out: dict[str, Any] = replace(root)
    done: dict[str, Any] = {}
    while todo := sorted(kept - set(done)):
        done[todo[0]] = replace(definitions[todo[0]])
    return {**out, "$defs": done} if done else out


def _refs(part: Any) -> set[str]:
    if isinstance(part, list):
        return set().union(*map(_refs, part))
    if not isinstance(part, dict):
        return set()
    own = {part["$ref"].removeprefix("#/$defs/")} if isinstance(part.get("$ref"), str) else set()
    return own.union(*map(_refs, part.values()))


def _type_name(entry: Mapping[str, Any]) -> str:
    if "enum" in entry or "const" in entry:
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in entry.get("enum", [entry.get("const")]))
    if "anyOf" in entry:
        return " | ".join(_type_name(part) for part in entry["anyOf"])
    if entry.get("type") == "array" and isinstance(entry.get("items"), dict):
        return f"array of {_type_name(entry['items'])}"
    return str(entry.get("type", "object" if "$ref" in entry else "any"))


def _type_repr(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def _for_pydantic(annotation: Any) -> Any:
    """Replace `typing.TypedDict` by `typing_extensions.TypedDict`, which pydantic requires before Python 3.12."""
    if sys.version_info >= (3, 12):
        return annotation
    if typing.is_typeddict(annotation) and type(annotation).__module__ == "typing":
        hints = typing.get_type_hints(annotation, include_extras=True)
        fields = {
            key: typing_extensions.Required[_for_pydantic(hint)]
            if key in annotation.__required_keys__
            else typing_extensions.NotRequired[_for_pydantic(hint)]
            for key, hint in hints.items()
        }
        make: Any = typing_extensions.TypedDict
        twin = make(annotation.__name__, fields)
        twin.__doc__ = annotation.__doc__
        return twin
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is None or origin is typing.Literal or not args:
        return annotation
    if origin is Annotated:
        return Annotated[(_for_pydantic(args[0]), *annotation.__metadata__)]
    new = tuple(_for_pydantic(a) if not isinstance(a, list) else a for a in args)
    if new == args:
        return annotation
    return typing.Union[new] if origin is pytypes.UnionType else origin[new]  # noqa: UP007  # members are only known here
