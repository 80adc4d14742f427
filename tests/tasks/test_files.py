"""Tasks of files, of the hub and of functions; how a prompt is rendered and what it may be."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from klamp.errors import ConfigError, DataError, MissingLibrary, RewardError, UnknownNameError
from klamp.lab.tasks import Example, Task, TaskConfig, arithmetic_tokenizer, load_task, rows_task
from klamp.lab.tasks.base import has_own_prompts, short_name
from klamp.lab.tasks.files import chat_cautions, check_prompts, prompt_text, read_rows, uses_chat_template

ROWS: list[dict[str, Any]] = [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(40)]


def write(folder: Path, rows: list[Any], name: str = "data.jsonl") -> str:
    path = folder / name
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("[" + ",".join(lines) + "]" if path.suffix == ".json" else "\n".join(lines) + "\n")
    return str(path)


def load(path: str, **options: Any) -> Task:
    return load_task(TaskConfig(task=path, **options), arithmetic_tokenizer())


def held_out(task: Task) -> list[str]:
    return [e.prompt for rows in task.evaluation.values() for e in rows]


@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.parquet", "DATA.JSONL"])
def test_every_format_gives_the_same_task(tmp_path: Path, name: str) -> None:
    task = load(write(tmp_path, ROWS, name))
    expected = load(write(tmp_path, ROWS, "expected.jsonl"))
    assert [e.prompt for e in task.train] == [e.prompt for e in expected.train]
    assert held_out(task) == held_out(expected)
    assert len(task.train) == 36
    first = task.train[0]
    assert first.answer == str(int(first.prompt.split("+")[0]) + 1)
    assert first.fields == {"prompt": first.prompt, "answer": first.answer}
    assert (task.score(first, first.answer), task.score(first, "no")) == (1.0, 0.0)


def test_the_split_is_stable_disjoint_and_moves_with_the_seed(tmp_path: Path) -> None:
    rows = [*ROWS, *ROWS[:20]]  # repeated prompts must not end up on both sides
    path = write(tmp_path, rows)
    task = load(path)
    assert set(held_out(task)).isdisjoint(e.prompt for e in task.train)
    assert {*held_out(task), *(e.prompt for e in task.train)} == {r["prompt"] for r in ROWS}
    assert held_out(load(path)) == held_out(task)
    assert held_out(load(write(tmp_path, rows[::-1], "b.jsonl")))[::-1] == held_out(task)
    assert held_out(load(path, task_seed=1)) != held_out(task)


def test_columns_can_have_any_name(tmp_path: Path) -> None:
    rows = [{"q": f"{i}", "gold": None if i else "x", "kind": "b" if i % 3 else "a", "n": i + 1.0} for i in range(30)]
    options = {"prompt_column": "q", "answer_column": "gold", "skill_column": "kind", "reference_length_column": "n"}
    task = load(write(tmp_path, rows), reward="tests.ablation.rewards:digits", **options)
    example = next(e for e in task.train if e.prompt == "7" or e.prompt == "8")
    number = int(example.prompt)
    assert example.skill == ("b" if number % 3 else "a")
    assert example.reference_length == number + 1
    assert example.answer == ""
    assert example.fields["q"] == example.fields["prompt"] == example.prompt
    assert example.fields["kind"] == example.skill
    # twice as many rows are of skill b: it is the one that is trained, and comes first
    assert task.rl_skill == "b"
    assert list(task.evaluation) == ["b", "a"]


def test_a_file_of_held_out_rows(tmp_path: Path) -> None:
    path = write(tmp_path, ROWS)
    other = write(tmp_path, [{"prompt": "9+9=", "answer": "18"}], "held.jsonl")
    task = load(path, eval_split=other)
    assert len(task.train) == 40
    assert held_out(task) == ["9+9="]
    skills = [{**row, "skill": "x"} for row in ROWS]
    path = write(tmp_path, skills)
    other = write(tmp_path, [{"prompt": "1", "answer": "1", "skill": "y"}], "held.jsonl")
    with pytest.raises(DataError, match="no held-out row is of the skill that is trained, 'x'"):
        load(path, eval_split=other, skill_column="skill")


def test_chat_messages_in_a_column(tmp_path: Path) -> None:
    tokenizer = arithmetic_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    rows = [{"prompt": [{"role": "user", "content": f"{i}"}], "answer": "1"} for i in range(10)]
    for name in ("m.jsonl", "m.parquet"):
        task = load_task(TaskConfig(task=write(tmp_path, rows, name), system_prompt="s"), tokenizer)
        number = task.train[0].fields["prompt"][0]["content"]
        assert task.train[0].prompt == f"[system]s[user]{number}"


OTHERS = [{"prompt": f"{i}", "answer": "x", "zero": 0, "half": 1.5, "true": True, "null": None} for i in range(3)]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([*ROWS, {"prompt": " ", "answer": "1"}], {}, "row 41 of data.jsonl has no prompt"),
        ([{"question": "q", "answer": "1"}], {}, r"(?s)no column 'prompt'.*the columns answer, question"),
        ([*ROWS, "{broken"], {}, "line 41 of data.jsonl: {broken"),
        (["[1, 2]"], {}, r"(?s)line 1 of data.jsonl.*\[1, 2\] is not an object"),
        ([], {}, "no rows"),
        ([ROWS[0]] * 5, {}, "too few different prompts"),
        (OTHERS, {"answer_column": "gold"}, "no column 'gold'"),
        (OTHERS, {"skill_column": "kind"}, "no column 'kind'"),
        (OTHERS, {"reference_length_column": "n"}, "no column 'n'"),
        *(
            (OTHERS, {"reference_length_column": name}, "row 1 of data.jsonl has no usable reference length")
            for name in ("answer", "zero", "half", "true", "null")
        ),
    ],
)
def test_rows_and_columns_that_cannot_be_used_are_named(tmp_path, rows, options, message) -> None:
    with pytest.raises(DataError, match=message):
        load(write(tmp_path, rows), **options)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load(str(tmp_path / "missing.jsonl"))
    for name in ("damaged.parquet", "damaged.json", "damaged.jsonl"):
        (tmp_path / name).write_bytes(b"[\xff\xfe")
        with pytest.raises(DataError, match="cannot be read"):
            load(str(tmp_path / name))
    with pytest.raises(UnknownNameError, match="unknown task"):
        load(str(tmp_path / "data.csv"))


@pytest.mark.parametrize("line", ['{"prompt": "\\ud800"}', '{"prompt": "\\uDFFF", "answer": "1"}', "[" * 100_000])
@pytest.mark.parametrize("name", ["data.jsonl", "data.json"])
def test_text_that_nothing_can_be_done_with_is_refused(tmp_path, line, name):
    (tmp_path / name).write_text(line if name.endswith("l") else f"[{line}]")
    with pytest.raises(DataError) as caught:
        read_rows(str(tmp_path / name))
    str(caught.value).encode()
    text = '{"prompt": "\\ud83d\\ude00"}'
    (tmp_path / name).write_text("\ufeff" + (text if name.endswith("l") else f"[{text}]"), encoding="utf-8")
    assert read_rows(str(tmp_path / name)) == [{"prompt": "😀"}]


def test_a_data_set_of_the_hub_is_read_by_its_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split, count in (("train", 3), ("test", 2)):
        rows = [{"question": f"{split} {i}", "solution": str(i)} for i in range(count)]
        write(tmp_path, rows, f"{split}.jsonl")
    read = read_rows(f"hub:{tmp_path}")
    assert [row["question"] for row in read] == ["train 0", "train 1", "train 2"]
    assert [row["solution"] for row in read_rows(f"hub:{tmp_path}::test")] == ["0", "1"]
    with pytest.raises(DataError, match="cannot be loaded") as caught:
        read_rows(f"hub:{tmp_path}::validation")
    assert "validation" in str(caught.value.why) and "hub:NAME::SPLIT" in str(caught.value.fix)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingLibrary, match="a data set of the hub needs datasets"):
        read_rows(f"hub:{tmp_path}")


def doubled(config: TaskConfig, tokenizer: Any) -> Task:
    """Rows made in place; the reward is broken for one completion."""
    task = rows_task([{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(30)], config, tokenizer)
    return Task(**{**vars(task), "score": lambda example, text: float("nan") if text == "nan" else len(text)})


def nothing(config: TaskConfig, tokenizer: Any) -> None:
    """No task."""


HERE = "tests.tasks.test_files"


@pytest.mark.parametrize("module", [HERE, __file__])
def test_a_function_of_a_module_or_a_file_makes_the_task(module: str) -> None:
    task = load(f"{module}:doubled", train_size=5, eval_size=3)
    assert (task.name, len(task.train), len(task.evaluation["task"])) == ("doubled", 5, 3)
    assert task.score(task.train[0], "ab") == 2.0
    with pytest.raises(RewardError, match="not finite"):
        task.score(task.train[0], "nan")
    named = load(f"{module}:doubled", reward="exact_match")
    assert named.score(task.train[0], task.train[0].answer) == 1.0, "in the place of the task's own"


def test_what_is_no_task_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("raise BaseException('on import')")
    for name, words in {
        f"{HERE}:nothing": "returned no task",
        f"{HERE}:doubles": "did you mean 'doubled'",
        f"{tmp_path / 'none.py'}:task": "cannot be imported",
        f"{tmp_path / 'ends.py'}:task": "cannot be imported",
    }.items():
        with pytest.raises(ConfigError, match=words):
            load(name)


@pytest.mark.parametrize(
    ("task", "own", "name"),
    [
        ("arithmetic", True, "arithmetic"),
        ("my.tasks:chess", True, "chess"),
        ("dir/tasks.py:chess", True, "chess"),
        ("dir/data.jsonl", False, "data"),
        ("dir/a:b.jsonl", False, "a-b"),
        ("hub:openai/gsm8k:main:train", False, "gsm8k-main-train"),
    ],
)
def test_a_name_says_whether_a_task_brings_its_prompts(task: str, own: bool, name: str) -> None:
    assert (has_own_prompts(task), short_name(task)) == (own, name)


TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('odd role') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% if not loop.last or add_generation_prompt %};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chat() -> Any:
    tokenizer = arithmetic_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_a_template_is_used_where_there_is_one_unless_told_otherwise(chat: Any) -> None:
    assert uses_chat_template(TaskConfig(), chat)
    assert not uses_chat_template(TaskConfig(), arithmetic_tokenizer())
    assert not uses_chat_template(TaskConfig(chat_template=False), chat)
    with pytest.raises(DataError, match="chat_template is not set"):
        prompt_text("hi", TaskConfig(chat_template=True), arithmetic_tokenizer(), where="row 1")
    with pytest.raises(ConfigError, match="row 4 holds chat messages"):
        prompt_text([{"role": "user", "content": "a"}], TaskConfig(), arithmetic_tokenizer(), where="row 4")


@pytest.mark.parametrize(
    ("value", "system", "expected"),
    [
        ("hi", "", "<user>hi;<assistant>"),
        ("hi", "be kind", "<system>be kind;<user>hi;<assistant>"),
        ([{"role": "user", "content": "a"}], "", "<user>a;<assistant>"),
        # the row's own system message wins over the configured one
        ([{"role": "system", "content": "s"}, {"role": "user", "content": "a"}], "x", "<system>s;<user>a;<assistant>"),
        # a last message by the assistant is continued
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "so"}], "", "<user>a;<assistant>so"),
    ],
)
def test_templates_render_texts_and_messages(chat: Any, value: Any, system: str, expected: str) -> None:
    assert prompt_text(value, TaskConfig(system_prompt=system), chat, where="row 1") == expected


def test_without_a_template_text_stays_as_it_is(chat: Any) -> None:
    assert prompt_text(" 1+1=", TaskConfig(), arithmetic_tokenizer(), where="row 1") == " 1+1="
    assert prompt_text("1+1=", TaskConfig(chat_template=False), chat, where="row 1") == "1+1="
    assert prompt_text("1+1=", TaskConfig(system_prompt="add"), arithmetic_tokenizer(), where="row 1") == "add\n\n1+1="


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *((value, "row 7 has no prompt") for value in (None, "  \n", [], 5, {"role": "user"}, ["hi"])),
        ([{"role": "user", "content": None}], "row 7 has no prompt"),
        ([{"role": "robot", "content": "a"}], "(?s)template refuses row 7.*odd role"),
    ],
)
def test_a_prompt_that_is_none_or_that_the_template_refuses_names_its_row(chat: Any, value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        prompt_text(value, TaskConfig(), chat, where="row 7")


def check(prompts: list[str], limit: int | None) -> None:
    check_prompts([Example(prompt=p) for p in prompts], arithmetic_tokenizer(), limit, 4)


def test_a_prompt_may_fill_the_room_to_the_last_token() -> None:
    check(["1+1=", "123456"], 10)
    check([], 10)
    check(["1" * 500], None)


@pytest.mark.parametrize(
    ("prompts", "what"),
    [
        (["1+1=", "1234567"], "prompt 2 is too long: 7 tokens, and the limit is 6"),
        (["1", "2", ""], "prompt 3 has no tokens"),
        (["1+1=", "HELLO"], "prompt 2 cannot be tokenized"),
    ],
)
def test_a_prompt_that_cannot_be_used_names_its_row(prompts: list[str], what: str) -> None:
    with pytest.raises(DataError, match=what):
        check(prompts, 10)


WITH_TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' + m['content'] + '<|im_end|>' }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)


def tokenizer(*, template: str | None = WITH_TURNS) -> Any:
    made = arithmetic_tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = template
    return made


def said(made: Any, *, stop: tuple[str, ...] = ("<|im_end|>",), **config: Any) -> tuple[str, ...]:
    return chat_cautions(TaskConfig(**config), made, made.convert_tokens_to_ids(list(stop)))


def test_what_fits_is_left_alone() -> None:
    assert said(tokenizer()) == (), "a chat model with its template and its end"
    made = arithmetic_tokenizer()
    assert chat_cautions(TaskConfig(), made, [made.eos_token_id]) == (), "no chat model"
    assert said(tokenizer(template=None), chat_template=False) == () == said(tokenizer(), chat_template=False)
    assert said(tokenizer(), stop=(made.eos_token, "<|im_end|>")) == (), "one of several end tokens is enough"


def test_an_end_of_the_turn_that_ends_nothing_is_named_with_what_does() -> None:
    made = tokenizer()
    (caution,) = said(made, stop=(made.eos_token,))
    assert f"ends an answer with <|im_end|>, and completions end with ['{made.eos_token}']" in caution
