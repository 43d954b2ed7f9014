"""Token ids equal those of transformers, and what a folder may lack."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rolegraph.data import tokenizer
from rolegraph.data.report import BadRowError
from rolegraph.errors import DataError

CHATML = (
    "{%- if tools %}{{ tools | tojson }}{% endif -%}\n"
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'assistant' %}\n"
    "        {%- generation %}{{- '<|assistant|>' + message.content + '<|end|>\\n' }}{% endgeneration %}\n"
    "    {%- else %}\n"
    "        {{- '<|' + message.role + '|>' + message.content | trim + eos_token + '\\n' }}\n"
    "    {%- endif %}\n"
    "    {%- if loop.index > 6 %}{% break %}{% endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% if thinking %}{{ '<think>' }}{% endif %}{% endif %}\n"
)
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "State the final answer to the following arithmetic problem: 5 - 33 ="}],
    [{"role": "system", "content": " be brief "}, {"role": "user", "content": "héé 世界 \U0001f600\n\n\t<b>&amp;"}],
    [
        {"role": "user", "content": "a <|end|> in the text"},
        {"role": "assistant", "content": "yes, the answer"},
        {"role": "user", "content": "  \n"},
    ],
    [{"role": "user", "content": "x" * 3000}],
]


@pytest.mark.slow
@pytest.mark.parametrize("template", [None, CHATML])
def test_ids_equal_those_of_transformers(tiny_folder: str, template: str | None) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tiny_folder)
    for thinking in (False, True):
        ours = tokenizer.load(tiny_folder, template=template, variables={"thinking": thinking})
        for chat in CHATS:
            for prompt in (True, False):
                options = {"chat_template": template} if template else {}
                expected = theirs.apply_chat_template(
                    chat, add_generation_prompt=prompt, thinking=thinking, return_dict=False, **options
                )
                text = ours.render(chat, add_generation_prompt=prompt)
                assert ours.encode([text], False) == [expected]
    assert ours.encode([chat[0]["content"] for chat in CHATS], True) == [
        theirs(chat[0]["content"])["input_ids"] for chat in CHATS
    ]
    assert ours.eos_ids == (theirs.eos_token_id,)


@pytest.mark.slow
def test_a_folder_without_tokenizer_json_goes_through_transformers(tiny_folder: str, tmp_path: Path) -> None:
    shutil.copytree(tiny_folder, tmp_path / "model")
    fast = tokenizer.load(tiny_folder)
    encode, token_id = tokenizer._slow(str(tmp_path / "model"))
    assert encode(["5 + 3", "x"], False) == fast.encode(["5 + 3", "x"], False)
    assert token_id("<|end|>") == fast.eos_ids[0]


def _folder(source: str, target: Path, **changes: Any) -> str:
    shutil.copytree(source, target)
    path = target / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    for key, value in changes.items():
        settings[key] = value
        if value is None:
            del settings[key]
    path.write_text(json.dumps(settings))
    return str(target)


def test_where_the_template_comes_from(tiny_folder: str, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}]
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}!"}]
    folder = _folder(tiny_folder, tmp_path / "several", chat_template=several)
    assert tokenizer.load(folder).render(chat, add_generation_prompt=True) == "a!"
    Path(folder, "chat_template.jinja").write_text("{{ messages[0].content }}?")
    assert tokenizer.load(folder).render(chat, add_generation_prompt=True) == "a?"
    own = tmp_path / "own.jinja"
    own.write_text("<{{ messages[0].content }}>")
    assert tokenizer.load(folder, template=str(own)).render(chat, add_generation_prompt=True) == "<a>"
    with pytest.raises(DataError, match="neither a Jinja template nor the path"):
        tokenizer.load(folder, template="missing.jinja")
    with pytest.raises(DataError, match="cannot be read"):
        tokenizer.load(folder, template="{% for %}")
    bare = tokenizer.load(_folder(tiny_folder, tmp_path / "bare", chat_template=None))
    with pytest.raises(DataError, match=r"set data.chat_template.*data.prompt_as=text"):
        bare.render(chat, add_generation_prompt=True)


def test_end_ids_of_generation_config_come_first(tiny_folder: str, tmp_path: Path) -> None:
    folder = Path(_folder(tiny_folder, tmp_path / "model"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 257]}))
    assert tokenizer.load(str(folder)).eos_ids == (258, 257)
    for name in ("generation_config.json", "config.json"):
        (folder / name).write_text("{}")
    assert tokenizer.load(str(folder)).eos_ids == (257,)
    bare = _folder(str(folder), tmp_path / "bare", eos_token=None)
    with pytest.raises(DataError, match="no end-of-sequence id"):
        tokenizer.load(bare)


def test_a_template_cannot_reach_python(tiny_folder: str) -> None:
    chat = [{"role": "user", "content": "a"}]
    model = tokenizer.load(tiny_folder, template="{{ messages.append(1) }}{{ ''.__class__.__mro__ }}")
    with pytest.raises(BadRowError, match="refuses"):
        model.render(chat, add_generation_prompt=True)


def test_saved_truncation_and_padding_are_switched_off(tiny_folder: str, tmp_path: Path) -> None:
    folder = Path(_folder(tiny_folder, tmp_path / "model"))
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    assert [len(ids) for ids in tokenizer.load(str(folder)).encode(["abcdefgh", "a"], False)] == [8, 1]


def test_a_broken_tokenizer_is_named(tiny_folder: str, tmp_path: Path) -> None:
    folder = Path(_folder(tiny_folder, tmp_path / "model"))
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer.json cannot be read"):
        tokenizer.load(str(folder))
