"""The model's tokenizer and chat template without transformers, whose import takes seconds.

The ids are those of `transformers`: the same `tokenizer.json` by the same library, the same Jinja environment for the
template (a test compares them). A model without a `tokenizer.json` is loaded through transformers instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from rolegraph.data.report import BadRowError
from rolegraph.errors import DataError


class Encoder(Protocol):
    """What is needed of a tokenizer library."""

    def __call__(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text."""
        ...


def first_difference(one: str, other: str) -> str | None:
    """The first token id that two models' tokenizers read differently, in words; null where there is none.

    One may have ids that the other lacks: what is compared is what both have.
    """
    ours, theirs = _tokens(one), _tokens(other)
    for token_id in sorted(ours.keys() & theirs.keys()):
        if ours[token_id] != theirs[token_id]:
            return f"token {token_id} is {ours[token_id]!r} for the policy and {theirs[token_id]!r} there"
    return None


def _tokens(folder: str) -> dict[int, str]:
    """Every token by id, those that were added included."""
    from tokenizers import Tokenizer

    path = Path(folder, "tokenizer.json")
    if path.exists():
        words: dict[str, int] = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    else:
        from transformers import AutoTokenizer

        words = AutoTokenizer.from_pretrained(folder).get_vocab()
    return {token_id: word for word, token_id in words.items()}


@dataclass
class ChatTokenizer:
    """Texts and chats to token ids."""

    encode: Encoder
    eos_ids: tuple[int, ...]
    """Ids that end a response; the first is the one that is appended."""
    template: str | None
    variables: dict[str, Any] = field(default_factory=dict)
    """What the template sees beside the messages: special tokens, and the config's own variables."""

    def __post_init__(self) -> None:
        self._compiled = None if self.template is None else compile_template(self.template)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The chat as the model's text.

        Raises:
            BadRowError: the template refuses these messages, with its own words.
            DataError: there is no template.
        """
        import jinja2

        if self._compiled is None:
            raise DataError(
                "the model has no chat template: set data.chat_template to one (text or a file), "
                "or data.prompt_as=text for prompts of raw text"
            )
        try:
            values = {"tools": None, "documents": None, **self.variables}
            return self._compiled.render(messages=messages, add_generation_prompt=add_generation_prompt, **values)
        except (jinja2.TemplateError, TypeError) as error:
            raise BadRowError("the chat template refuses the messages", str(error)) from error


def load(model_path: str, *, template: str | None = None, variables: Mapping[str, Any] | None = None) -> ChatTokenizer:
    """The tokenizer of a Hugging Face folder; `template` is another Jinja chat template, or the path of one.

    Raises:
        DataError: the folder has no tokenizer, or no end-of-sequence id.
    """
    folder = Path(model_path)
    settings = _json(folder / "tokenizer_config.json")
    special = {name: _content(settings[name]) for name in _SPECIAL if settings.get(name) is not None}
    if (folder / "tokenizer.json").is_file():
        encode, token_id = _fast(folder / "tokenizer.json", settings)
    else:
        encode, token_id = _slow(model_path)
    ids = _eos_ids(folder)
    if "eos_token" in special:
        ids.append(token_id(special["eos_token"]))
    eos = tuple(dict.fromkeys(i for i in ids if i is not None))
    if not eos:
        raise DataError(f"{model_path} names no end-of-sequence id (generation_config.json, tokenizer_config.json)")
    chosen = _own_template(folder, settings) if template is None else _given_template(template)
    return ChatTokenizer(encode, eos, chosen, {**special, **(variables or {})})


_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def compile_template(template: str) -> Any:
    """A Jinja template in the environment that transformers gives chat templates."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise DataError(f"the chat template cannot be read: {error}") from error


def _generation_tag() -> Any:
    """The `{% generation %}` tag, which marks the assistant's text for masks and renders its body as it is."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return Generation


def _fast(path: Path, settings: Mapping[str, Any]) -> tuple[Encoder, Any]:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{path} cannot be read: {error}") from error
    # A tokenizer.json may carry the truncation and padding of whoever saved it; lengths are ours to keep.
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        found = tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in found]

    return encode, tokenizer.token_to_id


def _slow(model_path: str) -> tuple[Encoder, Any]:
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise DataError(f"{model_path} has no tokenizer that can be loaded: {error}") from error

    def encode(texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    return encode, tokenizer.convert_tokens_to_ids


def _eos_ids(folder: Path) -> list[int | None]:
    for name in ("generation_config.json", "config.json"):
        ids = _json(folder / name).get("eos_token_id")
        if ids is not None:
            return list(ids) if isinstance(ids, list) else [ids]
    return []


def _own_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    legacy = _json(folder / "chat_template.json").get("chat_template")
    template = settings.get("chat_template", legacy)
    if isinstance(template, list):  # several by name
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template


def _given_template(template: str) -> str:
    # A template has braces, a path has none.
    if "{" in template:
        return template
    file = Path(template).expanduser()
    if not file.is_file():
        raise DataError(f"data.chat_template={template!r} is neither a Jinja template nor the path of a file")
    return file.read_text(encoding="utf-8")


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)
