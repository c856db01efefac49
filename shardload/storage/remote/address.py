"""Which store does a URL name, and how is it reached? Options, environment variables (obstore reads those), AWS profiles.

A store, its connections, and the limit of requests to it are one thing: all that is read of it in this process, in one call or
in several, shares them (`_kept`). Over HTTP it is a folder, elsewhere a bucket.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from shardload.errors import ConfigError
from shardload.storage.remote.throttle import Throttle

_WITHOUT_URL = "store://"  # objects of a store that the caller made, and that has no URL
_SCHEMES = {
    "store": "",
    "s3": "S3Store",
    "s3a": "S3Store",
    "gs": "GCSStore",
    "az": "AzureStore",
    "http": "HTTPStore",
    "https": "HTTPStore",
}
_OF_CLIENT = frozenset(
    """allow_http allow_invalid_certificates connect_timeout default_headers http1_only http2_only pool_idle_timeout
    pool_max_idle_per_host proxy_ca_certificate proxy_excludes proxy_url randomize_addresses read_timeout root_certificate
    user_agent""".split()  # noqa: SIM905
)
_OURS = frozenset({"profile", "requests", "store"})
# A body may take as long as it moves: the time-out is for one read of it. (7 days stand for none.)
_TIMEOUTS = {"timeout": "7 days", "read_timeout": "30 s", "connect_timeout": "10 s"}
_NO_RETRIES = {"max_retries": 0, "retry_timeout": timedelta(0)}  # `client` does it, for bodies and with one count
_ENDPOINT = re.compile(r"(aws_|azure_|azure_storage_)?endpoint(_url)?(_s3)?", re.IGNORECASE)
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_PLAIN_NAME = re.compile(r"[\w.-]*[\w-]", re.ASCII)  # which no store escapes
_MOST_KEPT = 32
_stores: dict[str, tuple[Any, Throttle, Any]] = {}  # of obstore, by what each is made of; the one that was used last is last
_lock = threading.Lock()
_OF_PROFILE = {
    "access_key_id": "aws_access_key_id",
    "secret_access_key": "aws_secret_access_key",
    "session_token": "aws_session_token",
    "region": "region",
    "endpoint": "endpoint_url",
}


class StorageOptions(dict[str, Any]):
    """What the caller passes as ``storage=``. Its text is the names alone: values may be keys.

    >>> StorageOptions({"secret_access_key": "abc", "region": "us-west-2"})
    {region, secret_access_key}
    """

    def __hash__(self) -> int:  # type: ignore[override]  # of a frozen `Access`
        return hash(frozenset(self))

    def __repr__(self) -> str:
        return f"{{{', '.join(sorted(self))}}}"


def is_remote(path: Any) -> bool:
    """True for the URL of an object store or an HTTP server.

    >>> is_remote("s3://bucket/run.h5"), is_remote("run.h5"), is_remote("file:///run.h5")
    (True, False, False)
    """
    scheme, separator, _ = path.partition("://") if isinstance(path, str) else ("", "", "")
    return bool(separator) and scheme.lower() in _SCHEMES


def with_store(paths: Any, options: Mapping[str, Any] | None) -> tuple[Any, Mapping[str, Any] | None]:
    """A path, or a tree of paths, with URLs in place of ``(obstore store, key)``, and options that have the store.

    ConfigError if there are several stores: the options of a call are those of one. Also if there are other options than the
    number of requests: the store has its own.
    """
    stores: list[Any] = []

    def with_url(path: Any) -> Any:
        if isinstance(path, tuple) and len(path) == 2 and type(path[0]).__module__.partition(".")[0] == "obstore":
            if any(store is not path[0] for store in stores):
                raise ConfigError(
                    "a call reads from one store that was handed in, and was given several: load in several calls"
                )
            stores[:] = [path[0]]
            return f"{_root_of(path[0])}{path[1].lstrip('/')}"
        if isinstance(path, Mapping):
            return {name: with_url(below) for name, below in path.items()}
        return type(path)(map(with_url, path)) if type(path) in (list, tuple) else path

    urls = with_url(paths)
    if not stores:
        return paths, options
    if others := sorted({*(options or {})} - {"requests", "store"}):
        raise ConfigError(
            f"storage has {', '.join(map(repr, others))}, but the store that was handed in is reached as it was made: it may "
            "have 'requests' alone. Make the store with the others, or pass a URL"
        )
    return urls, {**(options or {}), "store": stores[0]}


def without_secrets(url: str) -> str:
    """A URL without what may be secret: user, password, query, fragment.

    >>> [without_secrets(url) for url in ("https://me:pw@host/a.h5?X-Amz-Signature=1", "s3://bucket/a?b.h5", "a.h5")]
    ['https://host/a.h5', 's3://bucket/a?b.h5', 'a.h5']
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.lower() not in _SCHEMES:
        return url
    if scheme.lower() in ("http", "https"):
        rest = re.split("[?#]", rest, maxsplit=1)[0]
    host, slash, key = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{key}"


def address_of(url: str, options: Mapping[str, Any]) -> tuple[Any, Throttle, str, str]:
    """What a URL names: a store of obstore, the limit of requests to it, the key in it (of an object or a folder), and the URL
    for people. ConfigError if the URL or an option makes no sense, or obstore is not installed.
    """
    try:
        import obstore.store as stores
    except ImportError:
        text = f"'{without_secrets(url)}' is read with obstore, which is not installed: pip install 'shardload[remote]'"
        raise ConfigError(text) from None
    ours = {name: value for name, value in options.items() if name in _OURS}
    requests = _count(ours.get("requests", 16))
    if (store := ours.get("store")) is not None and f"{url}/".startswith(root := _root_of(store)):
        return *_handed_in(store, requests), f"{url}/".removeprefix(root).strip("/"), url
    scheme, _, rest = url.partition("://")
    kind, scheme = _SCHEMES[scheme.lower()], scheme.lower()
    client = {**_TIMEOUTS, **{name: value for name, value in options.items() if name in _OF_CLIENT}}
    config = {name: value for name, value in options.items() if name not in _OF_CLIENT | _OURS}
    bucket, _, key = rest.partition("/")
    if kind == "S3Store":
        config = _with_profile(config, ours.get("profile"))
    for endpoint in (url, *_endpoints(config, kind)):
        if endpoint.startswith("http://"):  # the caller said so
            client.setdefault("allow_http", True)
    failed = ""
    try:
        if kind == "HTTPStore":
            parts = urlsplit(url)
            if parts.username or parts.password:
                raise ConfigError(
                    f"'{without_secrets(url)}' has a user or password in it. Pass them as a header: "
                    'storage={"default_headers": {"authorization": ...}}'
                )
            if config:
                raise ConfigError(
                    f"storage has {', '.join(map(repr, sorted(config)))}, which an HTTP server has not: it may have "
                    f"{', '.join(sorted(_OF_CLIENT | {'requests'}))}"
                )
            # The path of a store's own URL stays as it is, with escapes and a query; a key would be escaped once more.
            folder, _, key = url.rpartition("/")
            if folder.endswith("/") or "?" in folder or not _PLAIN_NAME.fullmatch(key):  # (a query may have slashes)
                folder, key = url, ""
            store, throttle = _kept(stores.HTTPStore, [folder], {"client_options": client}, requests)
        elif not kind:
            raise ConfigError(f"'{url}' is of a store that was handed in before: pass (store, key) again")
        elif not bucket:
            raise ConfigError(f"'{without_secrets(url)}' names no bucket: s3://bucket/key is expected")
        else:
            store, throttle = _kept(getattr(stores, kind), [bucket], {**config, "client_options": client}, requests)
    except ConfigError:
        raise
    except Exception as error:  # obstore's text may quote values
        failed = _why_not(error, options)
    if failed:
        raise ConfigError(f"'{without_secrets(url)}' cannot be reached with storage={StorageOptions(options)}: {failed}")
    return store, throttle, key.strip("/"), without_secrets(url)


def _kept(make: Callable[..., Any], arguments: Sequence[Any], config: Mapping[str, Any], requests: int) -> tuple[Any, Throttle]:
    """A store of obstore without retries of its own, and the limit of requests to it. The last few stay for all that has the
    same options and environment, from which obstore takes keys.
    """
    # An object, such as a provider of keys, counts by its identity, not by its text: it is kept with the store.
    made_of = [make, arguments, config, requests, dict(os.environ)]
    key = json.dumps(made_of, sort_keys=True, default=lambda value: repr(value) if isinstance(value, bytes) else id(value))
    with _lock:
        store, throttle, _ = _stores.pop(key, (None, Throttle(requests), None))
        if store is None:
            store = make(*arguments, **{**config, "retry_config": _NO_RETRIES})
        _stores[key] = store, throttle, made_of
        if len(_stores) > _MOST_KEPT:
            del _stores[next(iter(_stores))]
    return store, throttle


def _endpoints(config: Mapping[str, Any], kind: str) -> list[str]:
    """The addresses of servers that options name; of S3 without any, those of environment variables. ConfigError for what is no
    address, at which obstore panics.
    """
    addresses = {f"storage's {name!r}": str(value) for name, value in config.items() if _ENDPOINT.fullmatch(name)}
    if kind == "S3Store" and not addresses:
        addresses = {name: os.environ[name] for name in _ENDPOINT_VARIABLES if name in os.environ}
    for name, value in addresses.items():
        if not re.match(r"https?://[^/\s]", value):
            raise ConfigError(
                f"{name} is no address of a server: it must begin with 'https://' or 'http://', as 'https://minio.example.org' "
                "does"
            )
    return list(addresses.values())


def _count(value: Any) -> int:
    """The option 'requests': the most requests that are under way."""
    count = int(value) if str(value).isdecimal() else 0
    if not 1 <= count <= 64:
        raise ConfigError("storage's 'requests', the most requests of a process that are under way, must be from 1 to 64")
    return count


def _why_not(error: Exception, options: Mapping[str, Any]) -> str:
    """Why obstore refuses options, in words without their values."""
    text = str(error)
    if (missing := re.search(r"Missing(?P<what>[A-Z]\w+)|Missing (?P<name>\w+)", text)) is not None:
        return f"{missing['what'] or missing['name']} is missing"
    if type(error).__name__ == "UnknownConfigurationKeyError":
        unknown = [name for name in options if f"'{name}'" in text]
        return f"there is no option {', '.join(unknown)}. obstore's documentation of its stores lists them"
    invalid = [name for name, value in options.items() if value != "" and str(value) in text]
    return f"the value of {' or '.join(invalid) or 'an option'} is not valid"


def _handed_in(store: Any, requests: int) -> tuple[Any, Throttle]:
    """The caller's store with our time-outs, and without retries of its own; unchanged if it cannot be made again."""
    try:
        (arguments, keywords) = store.__getnewargs_ex__()
        client = {**dict(keywords.get("client_options") or {}), **_TIMEOUTS}
        return _kept(type(store), arguments, {**keywords, "client_options": client}, requests)
    except Exception:  # memory, a folder, credentials from a function
        return store, Throttle(requests)


def _root_of(store: Any) -> str:
    """The URL above all objects of a store that the caller handed in; ``store://`` if it has none."""
    kind = type(store).__name__
    with_bucket = {"S3Store": "s3", "GCSStore": "gs", "AzureStore": "az"}
    if kind == "HTTPStore":
        return f"{without_secrets(store.url).rstrip('/')}/"
    if kind not in with_bucket:
        return _WITHOUT_URL
    config = dict(store.config)
    bucket = config.get("bucket") or config.get("container_name") or "bucket"
    return f"{with_bucket[kind]}://{bucket}/" + (f"{store.prefix}/" if store.prefix else "")


def _with_profile(config: dict[str, Any], profile: str | None) -> dict[str, Any]:
    """S3's options, completed from ``~/.aws``: what neither they nor environment variables say.

    A profile that is asked for in `profile` or AWS_PROFILE must be there. Roles and single sign-on are not followed.
    """
    options = {"endpoint" if _ENDPOINT.fullmatch(option) else option.lower().removeprefix("aws_") for option in config}
    skips = config.get("skip_signature", os.environ.get("AWS_SKIP_SIGNATURE", False))
    is_signed = str(skips).lower() not in ("1", "true", "yes", "on")
    has_keys = not options.isdisjoint(("access_key_id", "credential_provider"))
    has_keys = has_keys or (not profile and "AWS_ACCESS_KEY_ID" in os.environ)
    profile = profile or os.environ.get("AWS_PROFILE")
    name, values, paths, damaged = profile or "default", dict[str, str](), list[str](), ""
    for variable, file, section in (
        ("AWS_CONFIG_FILE", "config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name),
    ):
        path = os.environ.get(variable) or os.path.expanduser(f"~/.aws/{file}")
        paths.append(path)
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeError):  # raised below: its text quotes the line, which may be a key
            damaged = path
        if parser.has_section(section):
            values.update(parser.items(section))
    if damaged:
        raise ConfigError(f"'{damaged}' cannot be read: it is no file of AWS profiles")
    if profile and not values:
        raise ConfigError(f"there is no profile '{profile}' in {' or '.join(paths)}")
    if profile and is_signed and not has_keys and "aws_access_key_id" not in values:
        raise ConfigError(
            f"profile '{profile}' has no keys of its own (a role or single sign-on, which are not followed). Type: "
            f'eval "$(aws configure export-credentials --profile {profile} --format env)"; unset AWS_PROFILE'
        )
    variables = {"region": ("AWS_REGION", "AWS_DEFAULT_REGION"), "endpoint": _ENDPOINT_VARIABLES}
    for option, key in _OF_PROFILE.items():
        is_set = option in options or any(variable in os.environ for variable in variables.get(option, ()))
        is_unwanted_key = key.startswith("aws_") and (has_keys or not is_signed)
        if key in values and not is_set and not is_unwanted_key:
            config = {**config, option: values[key]}
    return config
