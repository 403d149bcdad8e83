"""Configuration: defaults < TOML file < environment < flags, one frozen dataclass per service, checked at construction.

A service declares a frozen dataclass whose fields are made by `option`, and its main calls

    config = load(RouterConfig, "router", sys.argv[1:], os.environ, program="baton-router", description="…")

A field `lookup_ms` is the flag `--lookup-ms`, the key `lookup_ms` of the file (top level or table `[router]`) and the
variables `BATON_LOOKUP_MS` (every role that has the key; none for keys such as `prefill_policy`, whose variable would
read as another role's) and `BATON_ROUTER_LOOKUP_MS` (this role; wins). An empty variable counts as unset. The file is
named by `--config`, `BATON_ROUTER_CONFIG` or `BATON_CONFIG`. A field whose type is a dataclass (`limits: Limits`) is
flattened: each of its fields is an option of its own.

Types: str, int, float, bool (`--flag/--no-flag`), `str | None`, `int | None`, Literal, `tuple[str, ...]` (commas or
repeated flags). This module and the mains that hand it `os.environ` are the only readers of the environment.
"""

import argparse
import dataclasses
import difflib
import math
import re
import sys
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union

import msgspec

T = TypeVar("T")

ROLES = ("router", "bootstrap", "prefill", "decode")
"""Roles that may have a table in a shared file; a service ignores the tables of the others."""

TRUE_WORDS = ("1", "true", "yes", "on")
FALSE_WORDS = ("0", "false", "no", "off")


class ConfigError(ValueError):
    """A setting is wrong. The text names the key, where it came from, the value and what is allowed."""


def option(default: Any, help: str, *, choices: Sequence[str] | None = None) -> Any:
    """A field of a configuration dataclass. `default=MISSING` (of dataclasses) makes it required."""
    metadata = {"help": help, "choices": None if choices is None else tuple(choices)}
    return dataclasses.field(default=default, metadata=metadata)


def load(
    cls: type[T], role: str, argv: Sequence[str], environ: Mapping[str, str], *, program: str, description: str
) -> T:
    """The configuration of `role`, or SystemExit(2) with the reason on stderr (0 after `--help`)."""
    try:
        return resolve(cls, role, argv, environ, program=program, description=description)
    except ConfigError as error:
        sys.stderr.write(f"{program}: {error}\n{program}: see {program} --help\n")
        raise SystemExit(2) from error


def resolve(
    cls: type[T],
    role: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    program: str = "baton",
    description: str = "",
) -> T:
    """As `load`, but raises ConfigError."""
    settings = _settings(cls)
    flags = _read_flags(settings, _parser(settings, role, program, description), argv)
    env = _read_environment(settings, role, environ)
    named_file = flags.pop("config", None) or env.pop("config", None)
    file = {} if named_file is None else _read_file(settings, role, Path(str(named_file.raw)), named_file.source)
    given = file | env | flags
    values = {key: _convert(settings[key], value) for key, value in given.items()}
    for setting in settings.values():
        if setting.default is MISSING and setting.key not in values:
            variable = _variables(setting.key, role)[0]
            raise ConfigError(f"{setting.key} is required: give {setting.flag}, {variable} or the file's key")
    try:
        return _construct(cls, values)
    except ValueError as error:
        raise ConfigError(_blame(str(error), given)) from error


# -- what a dataclass declares


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One option: a field, or a field of a nested dataclass (then `group` is the nested field's name)."""

    key: str
    kind: type[Any]  # str, int, float or bool: of the value, or of each item where `many`
    optional: bool
    many: bool
    choices: tuple[str, ...] | None
    default: Any  # MISSING where required
    help: str
    group: str | None

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")


@dataclass(frozen=True, slots=True)
class Given:
    """A value as somebody wrote it, and where."""

    raw: object
    source: str


def is_secret(key: str) -> bool:
    """Whether the value of `key` must never be shown."""
    return key in ("token", "key") or key.endswith(("_token", "_key"))


def _settings(cls: type[Any]) -> dict[str, Setting]:
    settings: dict[str, Setting] = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            nested_hints = typing.get_type_hints(hints[field.name])
            nested_default = _default(field)
            for nested in dataclasses.fields(hints[field.name]):
                default = _default(nested) if nested_default is MISSING else getattr(nested_default, nested.name)
                settings[nested.name] = _setting(nested, nested_hints[nested.name], default, group=field.name)
        else:
            settings[field.name] = _setting(field, hints[field.name], _default(field), group=None)
    return settings


def _default(field: "dataclasses.Field[Any]") -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _setting(field: "dataclasses.Field[Any]", hint: Any, default: Any, *, group: str | None) -> Setting:
    choices, optional, many = field.metadata.get("choices"), False, False
    if typing.get_origin(hint) in (Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not types.NoneType]
        assert len(members) == 1, f"{field.name}: {hint} is not a type of options"
        hint, optional = members[0], True
    if typing.get_origin(hint) is tuple:
        hint, many = typing.get_args(hint)[0], True
    if typing.get_origin(hint) is Literal:
        hint, choices = str, typing.get_args(hint)
    assert hint in (str, int, float, bool), f"{field.name}: {hint} is not a type of options"
    return Setting(
        key=field.name,
        kind=hint,
        optional=optional,
        many=many,
        choices=choices,
        default=default,
        help=field.metadata.get("help", ""),
        group=group,
    )


# -- the three places a value may come from


def _read_flags(
    settings: Mapping[str, Setting], parser: argparse.ArgumentParser, argv: Sequence[str]
) -> dict[str, Given]:
    known, unknown = parser.parse_known_args(list(argv))
    if unknown:
        flags = ["--config", *(setting.flag for setting in settings.values())]
        raise ConfigError(f"unknown argument {unknown[0]}{_suggest(unknown[0].split('=')[0], flags)}")
    return {
        key: Given(raw, f"flag --{key.replace('_', '-')}" if raw is not False else f"flag --no-{key.replace('_', '-')}")
        for key, raw in vars(known).items()
    }


def _read_environment(settings: Mapping[str, Setting], role: str, environ: Mapping[str, str]) -> dict[str, Given]:
    names = {key: _variables(key, role) for key in (*settings, "config")}
    own = [name for several in names.values() for name in several]
    for name in environ:
        # `BATON_<KEY>` may belong to another role; `BATON_<ROLE>_<KEY>` can only be meant for us.
        if name.startswith(f"BATON_{role.upper()}_") and name not in own:
            raise ConfigError(f"environment variable {name}: {role} has no such key{_suggest(name, own)}")
    return {
        key: Given(environ[name], f"environment variable {name}")
        for key, several in names.items()
        for name in several
        if environ.get(name)
    }


def _read_file(settings: Mapping[str, Setting], role: str, path: Path, named_by: str) -> dict[str, Given]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"file {path} (from {named_by}): {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"file {path} (from {named_by}) is not valid TOML: {error}") from error
    own = content.pop(role, {})
    shared = {key: value for key, value in content.items() if not (key in ROLES and isinstance(value, dict))}
    if not isinstance(own, dict):
        shared, own = shared | {role: own}, {}  # a key that is spelt like the role, not its table
    groups = {setting.group for setting in settings.values()}
    given: dict[str, Given] = {}
    for table, where in ((shared, f"file {path}"), (own, f"file {path}, table [{role}]")):
        nested = [value for key, value in table.items() if key in groups and isinstance(value, dict)]
        flat = {key: value for key, value in table.items() if not (key in groups and isinstance(value, dict))}
        for values in (*nested, flat):
            for key, raw in values.items():
                if key not in settings:
                    hint = (
                        _suggest(key, list(settings))
                        or "; keys that only other roles have belong in their [role] tables"
                    )
                    raise ConfigError(f"{key} ({where}): {role} has no such key{hint}")
                given[key] = Given(raw, where)
    return given


def _variables(key: str, role: str) -> list[str]:
    """Names of the variables that set `key`, the stronger one last."""
    # The router's `prefill_policy` as BATON_PREFILL_POLICY would be read as the prefill workers' `policy`.
    shared = [] if key.startswith(tuple(f"{other}_" for other in ROLES)) else [f"BATON_{key.upper()}"]
    return [*shared, f"BATON_{role.upper()}_{key.upper()}"]


def _suggest(wrong: str, right: list[str]) -> str:
    close = difflib.get_close_matches(wrong, right, n=1)
    return f"; did you mean {close[0]}?" if close else ""


# -- from what was written to a value


def _convert(setting: Setting, given: Given) -> Any:
    """The typed value. Raises ConfigError."""
    raw = given.raw
    if setting.optional and isinstance(raw, str) and raw.lower() in ("", "none"):
        return None
    if not setting.many:
        return _convert_one(setting, raw, given.source)
    parts: list[Any] = raw if isinstance(raw, list) else [raw]
    items = [item for part in parts for item in (part.split(",") if isinstance(part, str) else [part])]
    items = [item.strip() if isinstance(item, str) else item for item in items]
    return tuple(_convert_one(setting, item, given.source) for item in items if item != "")


def _convert_one(setting: Setting, raw: object, source: str) -> Any:
    def refuse() -> NoReturn:
        shown = "***" if is_secret(setting.key) else repr(raw)
        raise ConfigError(f"{setting.key} = {shown} ({source}): must be {_allowed(setting)}")

    # bool is an int to Python, but `port = true` in a file is a mistake.
    if isinstance(raw, bool) != (setting.kind is bool) and not isinstance(raw, str):
        refuse()
    if setting.kind is bool:
        word = str(raw).lower()
        return word in TRUE_WORDS if word in TRUE_WORDS + FALSE_WORDS else refuse()
    if setting.kind is str:
        if not isinstance(raw, str) or (setting.choices is not None and raw not in setting.choices):
            refuse()
        return raw
    if not isinstance(raw, (str, int) if setting.kind is int else (str, int, float)):
        refuse()
    try:
        number = setting.kind(raw)
    except ValueError:
        refuse()
    return number if math.isfinite(number) else refuse()


def _allowed(setting: Setting) -> str:
    if setting.choices is not None:
        return "one of " + ", ".join(setting.choices)
    names = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
    return names[setting.kind] + (" (or none)" if setting.optional else "")


def _construct(cls: type[T], values: Mapping[str, Any]) -> T:
    """Build `cls`, and its nested dataclasses, from flat values; what is absent keeps its default."""
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(typing.cast(Any, cls)):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            own = {nested.name: values[nested.name] for nested in dataclasses.fields(hint) if nested.name in values}
            default = _default(field)
            build: Any = hint
            arguments[field.name] = build(**own) if default is MISSING else dataclasses.replace(default, **own)
        elif field.name in values:
            arguments[field.name] = values[field.name]
    return cls(**arguments)


def _blame(message: str, given: Mapping[str, Given]) -> str:
    """Add where the values came from that a constructor's complaint names."""
    words = set(re.findall(r"\w+", message))
    sources = [f"{key} comes from {value.source}" for key, value in given.items() if key in words]
    return "; ".join([message, *sources])


# -- help


def _parser(settings: Mapping[str, Setting], role: str, program: str, description: str) -> argparse.ArgumentParser:
    epilog = (
        f"Every option is also a key of the TOML file (top level, or table [{role}]) and an environment variable: "
        f"--some-option = some_option = BATON_{role.upper()}_SOME_OPTION (this role only, wins) = "
        "BATON_SOME_OPTION (every role that has it). Flags win over variables, variables over the file."
    )
    parser = argparse.ArgumentParser(
        prog=program,
        usage="%(prog)s [option …]",
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    main = parser.add_argument_group("main options")
    main.add_argument("--config", metavar="FILE", help=f"TOML file [env {' or '.join(_variables('config', role))}]")
    groups: dict[str | None, Any] = {None: main}
    for setting in settings.values():
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(
                str(setting.group), "units are in the names: _ms milliseconds, _max at most, _tokens, _bytes"
            )
        _add_flag(groups[setting.group], setting, _variables(setting.key, role)[0])
    return parser


def _add_flag(group: Any, setting: Setting, variable: str) -> None:
    default = "required" if setting.default is MISSING else f"default {_show(setting.key, setting.default)}"
    text = f"{setting.help} [{default}; env {variable}]".strip().replace("%", "%%")
    if setting.kind is bool:
        group.add_argument(setting.flag, dest=setting.key, action=argparse.BooleanOptionalAction, help=text)
    else:
        action = "append" if setting.many else "store"
        group.add_argument(setting.flag, dest=setting.key, action=action, metavar=_metavar(setting), help=text)


def _metavar(setting: Setting) -> str:
    if setting.choices is not None:
        return "{" + ",".join(setting.choices) + "}"
    unit = setting.key.rsplit("_", 1)[-1]
    if unit in ("ms", "bytes", "tokens", "port", "host", "url", "path", "dir", "file", "token", "key"):
        return unit.upper()
    return {str: "TEXT", int: "N", float: "X"}[setting.kind] + (",…" if setting.many else "")


# -- showing and handing on


def describe(config: Any) -> str:
    """One line for the log at start: every option, secrets as `***`; nested groups show what differs from default."""
    parts: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            changed = [
                f"{nested.name}={_show(nested.name, getattr(value, nested.name))}"
                for nested in dataclasses.fields(value)
                if getattr(value, nested.name) != _default(nested)
            ]
            parts += changed or [f"{field.name}=default"]
        else:
            parts.append(f"{field.name}={_show(field.name, value)}")
    return " ".join(parts)


def _show(key: str, value: object) -> str:
    if value is None or value in ((), ""):
        return "none"
    if is_secret(key):
        return "***"
    text = (
        ",".join(map(str, value))
        if isinstance(value, tuple)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )
    return re.sub(r"://[^/@\s]*@", "://***@", text)  # user and password inside a URL


def to_json(config: Any) -> str:
    """A validated configuration as text, for a child process. Holds secrets: never log it."""
    return msgspec.json.encode(config).decode()


def from_json(cls: type[T], text: str) -> T:
    """The inverse of `to_json`. Raises ConfigError."""
    try:
        return msgspec.json.decode(text, type=cls)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"not a {cls.__name__}: {error}") from error
