"""What a config of a sampling graph may say, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolegraph.algorithms import sampling_folder
from rolegraph.algorithms.sampling import takes_turns
from rolegraph.arithmetic import candidates, sentences
from rolegraph.config import load
from rolegraph.config.schema import RunConfig
from rolegraph.errors import ConfigError
from rolegraph.placement import plan, requests, this_machine

ORM = ("orm=functions", "reward=reasoning_gym")
PRM = ("prm=functions", "prm.reward_funcs=[arithmetic_steps]")


def run_of(*overrides: str) -> RunConfig:
    return load(["algorithm=sampling", "model=tiny", "data=arithmetic", *overrides]).run


def faults(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        run_of(*overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.n_best_to_keep=9", *ORM], "n_best_to_keep=9 is more than the 8 candidates of a row: lower it"),
        (["algorithm.data_range=[3,2]"], "data_range=[3, 2] names part 3 of 2, and they are numbered from 0"),
        (["algorithm.data_range=[0,0]"], "data_range=[0, 0]: there are no 0 parts"),
        (["algorithm.data_range=[-1,2]"], "the first number is 0 to 1"),
        (["algorithm.data_range=[1]"], "algorithm.data_range"),
        (["algorithm.prm_threshold=0.5", *ORM], "prm_threshold needs a process reward: choose one with prm=NAME"),
        (["algorithm.prm_reward=mean", *ORM], "prm_reward needs a process reward"),
        (["algorithm.easy_query_threshold=0.5", *PRM], "easy_query_threshold counts outcome rewards above 0"),
        (["algorithm.easy_query_threshold=0", *ORM], "algorithm.easy_query_threshold"),
        (["algorithm.easy_query_threshold=1.5", *ORM], "algorithm.easy_query_threshold"),
        (["algorithm.output=pairs"], "output=pairs needs scores by which a candidate passes or fails: choose one with"),
        (["algorithm.output=pairs", *PRM], "passes or fails: set algorithm.prm_threshold"),
        (["algorithm.output=pairs", "algorithm.n_best_to_keep=2", *ORM], "no effect with algorithm.output=pairs"),
        (["algorithm.output=pairs", "algorithm.num_return_sequences=1", *ORM], "needs two candidates a row"),
        (["algorithm.n_best_to_keep=2"], "n_best_to_keep=2 ranks by scores, and no role gives any"),
        (
            ["algorithm.n_best_to_keep=2", "algorithm.score_weights={orm: 0}", *ORM],
            "ranks by scores, and every weight in algorithm.score_weights is 0",
        ),
        (["algorithm.score_weights={prm: 2}", *ORM], "score_weights names `prm`, and the reward roles of this run are"),
        (["orm.skip_special_tokens=false", *ORM], "orm.skip_special_tokens=false needs token ids, and Sampling scores"),
        (["max_steps=10"], "max_steps=10 has no effect: Sampling goes over its rows once"),
        (["sampler=null"], "Sampling needs a sampler, or candidates of an earlier run"),
        (["algorithm.candidates=conf"], "has responses already, and sampler draws others: set sampler=null"),
        (["algorithm.candidates=conf", "sampler=null"], "candidates are there to be scored: choose a role"),
        (["algorithm.candidates=nowhere", "sampler=null", *ORM], "candidates=nowhere: there is no such file or folder"),
        (
            ["algorithm.candidates=conf", "sampler=null", "algorithm.temperature=0.5", *ORM],
            "algorithm.temperature has no effect with algorithm.candidates: nothing is drawn",
        ),
        (
            ["algorithm.candidates=conf", "sampler=null", "algorithm.num_return_sequences=2", *ORM],
            "algorithm.num_return_sequences has no effect with algorithm.candidates",
        ),
        (["algorithm.temperature=0"], "temperature=0 draws 8 times the same response"),
        (
            ["algorithm.temperature=0", "algorithm.num_return_sequences=1", "algorithm.top_p=0.5"],
            "algorithm.top_p has no effect with algorithm.temperature=0",
        ),
        (["algorithm.temperature=-1"], "algorithm.temperature"),
        (["algorithm.num_sampling_batch_size=0"], "algorithm.num_sampling_batch_size"),
        (["algorithm.overwrite=true", "resume=true", "output_dir=x"], "algorithm.overwrite=true removes what"),
        (["algorithm.redraw_faults=true"], "algorithm.redraw_faults=true is about what an earlier run could not draw"),
        (
            ["algorithm.candidates=conf", "sampler=null", "algorithm.redraw_faults=true", "resume=true", *ORM],
            "algorithm.redraw_faults has no effect with algorithm.candidates: nothing is drawn",
        ),
        (["train=megatron"], "Sampling uses no role `train`"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_what_would_be_ignored_or_cannot_be_is_refused(overrides: list[str], said: str) -> None:
    assert said in faults(*overrides)


LENGTHS = """
from rolegraph.rewards import reward

@reward("tokens")
def counted(completions, response_ids, bonus=1):
    return [len(ids) for ids in response_ids]

def keyed(completions, *, answer, response_ids):
    return [len(ids) for ids in response_ids]

def if_there(completions, *, response_ids=None, response_length):
    return response_length
"""


@pytest.mark.parametrize(
    ("functions", "scorer", "refused"),
    [
        ("[tokens]", "orm", "reward.reward_funcs: tokens reads response_ids"),
        ("[exact_match, my_lengths.keyed]", "orm", "reward.reward_funcs: my_lengths.keyed reads response_ids"),
        ("[my_lengths.keyed]", "prm", "prm.reward_funcs: my_lengths.keyed reads response_ids"),
        ("[my_lengths.if_there]", "orm", None),
        ("[length_penalty, {_target_: soft_overlong, max_length: 9, cache: 3}]", "orm", None),
    ],
)
def test_functions_that_read_tokens_are_refused_before_anything_starts(
    tmp_path: Path, functions: str, scorer: str, refused: str | None
) -> None:
    plugin = tmp_path / "my_lengths.py"
    plugin.write_text(LENGTHS)
    if scorer == "orm":
        words = ["orm=functions", "reward=exact_match"]
        words += [f"reward.reward_funcs={functions}", f"+reward.external_plugins=[{plugin}]"]
    else:
        words = ["prm=functions", f"prm.reward_funcs={functions}", f"+prm.external_plugins=[{plugin}]"]
    if refused is None:
        run_of(*words)
    else:
        assert f"{refused}, and Sampling scores candidates as their text: let it read response_length" in faults(*words)


def test_defaults_are_a_run() -> None:
    run = run_of()
    assert run.max_steps is None
    assert run.algorithm.config.rules(run.roles).weights == {}
    assert run_of("algorithm.temperature=0", "algorithm.num_return_sequences=1").algorithm.config.temperature == 0


def test_rules_follow_from_roles_and_weights() -> None:
    run = run_of(*ORM, *PRM, "+orm@orm_second=functions", "algorithm.score_weights={prm: 0.5}")
    rules = run.algorithm.config.rules(run.roles)
    assert rules.weights == {"prm": 0.5, "orm": 1.0, "orm_second": 1.0}
    assert rules.outcome_roles == ("orm", "orm_second")


def test_distillation_keeps_one_response_a_row() -> None:
    run = load(["algorithm=distill", "model=tiny", "data=arithmetic"]).run
    assert run.algorithm.config.num_return_sequences == 1
    assert set(run.roles) == {"sampler"}
    assert not run.algorithm.config.rules(run.roles).can_fail


def test_a_service_reads_text() -> None:
    openai = ("sampler=openai", "sampler.service.base_url=http://localhost:1/v1", "sampler.service.model=some")
    assert run_of(*openai).data_needs == "chat"
    assert run_of().data_needs == "prompt"


def test_both_stages_read_rows_alike(tmp_path: Path) -> None:
    for needs, sampler in (("prompt", ()), ("chat", OPENAI)):
        folder = tmp_path / needs
        sampling_folder.begin(run_of(*sampler), folder)
        (folder / "samples.jsonl").touch()
        assert run_of(f"algorithm.candidates={folder}", "sampler=null", *ORM).data_needs == needs


@pytest.mark.parametrize("kept", [None, "{", "[1]", '{"settings": {}}', '{"needs": "chat"}', '{"needs": "prompt"}'])
def test_rows_are_read_as_the_run_read_them_that_drew_the_candidates(tmp_path: Path, kept: str | None) -> None:
    (tmp_path / "samples.jsonl").touch()
    if kept is not None:
        (tmp_path / "settings.json").write_text(kept)
    for source in (tmp_path, tmp_path / "samples.jsonl"):
        run = run_of(f"algorithm.candidates={source}", "sampler=null", *ORM)
        assert run.data_needs == ("prompt" if kept == '{"needs": "prompt"}' else "chat")


def test_engines_have_room_for_a_prompt_and_a_candidate() -> None:
    run = run_of("data.max_length=100", "algorithm.max_completion_length=28")
    assert run.roles["sampler"].config.max_model_len == 128


TOGETHER, OPENAI = (
    "placement=colocate",
    ("sampler=openai", "sampler.service.base_url=http://localhost:1/v1", "sampler.service.model=some"),
)
CLASSIFIER = ("orm=classifier", "orm.model=some")


@pytest.mark.parametrize(
    ("overrides", "in_turn"),
    [
        ([TOGETHER, *ORM], False),
        ([TOGETHER, *ORM, *PRM], False),
        ([TOGETHER, *CLASSIFIER], True),
        ([TOGETHER, *CLASSIFIER, *PRM], True),
        (["placement.colocate_groups=[[sampler,orm]]", *ORM], False),
        (["placement.colocate_groups=[[orm,prm]]", *CLASSIFIER, *PRM], False),
        (["placement=separate", *CLASSIFIER], False),
        ([TOGETHER, *OPENAI, *CLASSIFIER], False),
    ],
    ids=lambda value: " ".join(value)[:70] if isinstance(value, list) else "",
)
def test_sampling_waits_for_those_alone_who_need_its_devices(overrides: list[str], in_turn: bool) -> None:
    assert takes_turns(run_of(*overrides)) is in_turn


def words(*overrides: str) -> dict[str, str]:
    run = run_of(*overrides)
    return dict(sentences(run, plan(this_machine(), requests(run.roles), run.placement)))


def test_the_plan_tells_rows_candidates_and_batches(tmp_path: Path) -> None:
    assert words("data.size=100", "algorithm.num_sampling_batch_size=16", "sampler.replicas=2") == {
        "a batch": "16 rows x 8 candidates = 128 candidates",
        "a sampler replica": "draws about 64 of them",
        "in all": "100 rows, 800 candidates, in 7 batches",
    }
    found = words("data.size=100", "data.limit=50", "algorithm.data_range=[0,3]")
    assert found["in all"] == "17 rows, 136 candidates, in 1 batch (of part 0 of 3 of the data)"
    (tmp_path / "rows.jsonl").touch()
    assert words("data=jsonl", f"data.path={tmp_path}/rows.jsonl")["in all"] == "every row of the data, once"
    (tmp_path / "samples.jsonl").touch()
    found = words(f"algorithm.candidates={tmp_path}", "sampler=null", "data.size=10", *ORM)
    assert found["a batch"] == f"64 rows with the candidates they have in {tmp_path}"
    assert found["in all"] == "10 rows, in 1 batch"


def test_other_algorithms_have_no_candidates() -> None:
    run = load(["algorithm=sft", "model=tiny"]).run
    assert candidates(run, plan(this_machine(), requests(run.roles), run.placement)) is None
