"""Tasks from data rows with one prompt each: of a .jsonl, .json or .parquet file, or of a data set of the hub."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klamp.audit.pair import turn_end
from klamp.errors import ConfigError, DataError, brief, missing_library, unknown_name
from klamp.files import at_home, json_of, with_end
from klamp.lab.tasks.base import ARITHMETIC_TASK, HUB, Example, Task, TaskConfig, exact_match, short_name, with_reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = Mapping[str, Any]
SUFFIXES = (".jsonl", ".json", ".parquet")
_HELD_OUT_SHARE = 10  # without a file of held-out rows, one row in this many is held out, for each skill


def rows_task(
    rows: Sequence[Row],
    config: TaskConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    held_out: Sequence[Row] | None = None,
) -> Task:
    """The task of data rows with one prompt each; the most frequent skill counts as the RL skill.

    `held_out`: None holds out a tenth of each skill's prompts, by a hash of their text.

    Raises:
        DataError: a row that cannot be used, or too few prompts to hold some out.
    """
    train = _examples(rows, config.task, config, tokenizer)
    if held_out is None:
        train, evaluated = split(train, config)
    else:
        evaluated = _examples(held_out, config.eval_split, config, tokenizer)
    if config.train_size:
        train = _sample(train, config.train_size, config.task_seed)
    rl_skill = Counter(example.skill for example in train).most_common(1)[0][0]
    task = Task(
        name=short_name(config.task),
        train=tuple(train),
        evaluation=_by_skill(evaluated, rl_skill, config),
        rl_skill=rl_skill,
        score=lambda example, text: exact_match(example, text) if example.answer.strip() else 0.0,
    )
    return task if config.reward else with_reward(task, "exact_match")


def read_rows(path: str) -> list[Row]:
    """Read the rows of a .jsonl, .json (a list of objects) or .parquet file, or of a data set of the hub."""
    if path.startswith(HUB):
        return _hub_rows(path)
    file = at_home(path)
    if file.suffix.lower() not in SUFFIXES:
        names = (ARITHMETIC_TASK, f"{HUB}NAME", *(f"PATH{suffix}" for suffix in SUFFIXES), "module:function")
        raise unknown_name("task", path, names)
    place = str(file.absolute())
    if not file.exists():
        raise DataError("the data file does not exist", got=path, why=f"looked for {place}", fix="check the path")
    try:
        with_end(file)
        if file.suffix.lower() == ".parquet":
            from pyarrow import parquet

            rows = parquet.read_table(file).to_pylist()
        elif file.suffix.lower() == ".json":
            rows = [_object(value) for value in json_of(file.read_text(encoding="utf-8-sig"))]
        else:
            rows = []
            lines = file.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: a JSON text has other line ends
            for number, line in enumerate(lines, start=1):
                place = f"line {number} of {file.name}: {brief(line)}"
                rows += [_object(json_of(line))] if line.strip() else []
    except Exception as error:  # pyarrow has a dozen unrelated errors for a damaged file
        why = f"{type(error).__name__}: {error}"
        fix = "write one JSON object per line in a .jsonl file, a list of objects in a .json file, or a Parquet file"
        raise DataError("the data file cannot be read", got=place, why=why, fix=fix) from error
    if not rows:
        raise DataError("the data file has no rows", got=path, why="there is nothing to train on", fix="fill the file")
    return rows


def _object(value: Any) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"{brief(repr(value))} is not an object, and a row is made of named columns")
    return value


def _hub_rows(path: str) -> list[Row]:
    """The rows of a data set, which `datasets` downloads or finds in a folder; its split `train` if none is named."""
    name, config, split, *_ = [*path.removeprefix(HUB).split(":", 2), "", ""]
    try:
        from datasets import load_dataset  # comes with TRL and verl
    except ImportError as error:
        raise missing_library("datasets", by="a data set of the hub", instead="or name a file") from error
    try:
        return list(load_dataset(str(at_home(name)), config or None, split=split or "train"))  # pyright: ignore
    except Exception as error:  # a hub that is not reached, a name, a configuration or a split that is not there
        raise DataError(
            "the data set cannot be loaded",
            got=path,
            why=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            fix=f"write {HUB}NAME:CONFIG:SPLIT ({HUB}NAME::SPLIT for the only configuration), NAME as on the hub or a "
            "folder that holds a copy",
        ) from error


def _examples(rows: Sequence[Row], path: str, config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """Rows as examples, in the same order; a DataError if they lack a column that the configuration names."""
    name, present = Path(path).name, sorted({key for row in rows for key in row})
    # the default name of the answers may be absent; one that the user chose may not
    answers = config.answer_column if config.answer_column != "answer" else ""
    for column in filter(None, (config.prompt_column, answers, config.skill_column, config.reference_length_column)):
        if column not in present:
            fix = "set prompt_column, answer_column, skill_column or reference_length_column to a column there is"
            what, why = f"{name} has no column {column!r}", "the configuration names it"
            raise DataError(what, got=f"the columns {', '.join(present)}", why=why, fix=fix)
    return [_example(row, f"row {i} of {name}", config, tokenizer) for i, row in enumerate(rows, start=1)]


def _example(row: Row, where: str, config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> Example:
    prompt, answer = row.get(config.prompt_column), row.get(config.answer_column)
    text, length = "" if answer is None else str(answer), None
    skill = row.get(config.skill_column) if config.skill_column else "task"
    if skill is None:
        fix = "fill the column, or leave skill_column unset"
        why = "it would count towards no row of the evaluation table"
        raise DataError(f"{where} has no skill", got=f"{config.skill_column} is empty", why=why, fix=fix)
    if config.reference_length_column:
        length = row.get(config.reference_length_column)
        if isinstance(length, bool) or not isinstance(length, int | float) or length < 1 or length != int(length):
            got, why = f"{config.reference_length_column} = {length!r}", "it is a whole number of tokens, at least 1"
            fix = "fill the column, or leave reference_length_column unset"
            raise DataError(f"{where} has no usable reference length", got=got, why=why, fix=fix)
    return Example(
        prompt=prompt_text(prompt, config, tokenizer, where=where),
        answer=text,
        skill=str(skill),
        fields={**row, "prompt": prompt, "answer": text},
        reference_length=None if length is None else int(length),
    )


def split(examples: Sequence[Example], config: TaskConfig) -> tuple[list[Example], list[Example]]:
    """Divide examples into training and evaluation: a tenth of each skill's, at most `eval_size`, is held out."""
    held_out: set[str] = set()
    for skill in {e.skill for e in examples}:
        prompts = sorted({e.prompt for e in examples if e.skill == skill}, key=lambda p: _hash(p, config.task_seed))
        held_out.update(prompts[: min(config.eval_size, max(1, len(prompts) // _HELD_OUT_SHARE))])
    train = [e for e in examples if e.prompt not in held_out]
    if not train:
        got = f"{len(held_out)} different prompts in {len(examples)} rows"
        fix = "add rows, or name a file of held-out rows (eval_split)"
        why = "evaluation needs prompts that are not trained on"
        raise DataError("there are too few different prompts to hold some out", got=got, why=why, fix=fix)
    return train, [e for e in examples if e.prompt in held_out]


def _sample(examples: Sequence[Example], count: int, seed: int) -> list[Example]:
    """Choose `count` examples by a hash of their prompts, in the order of the file."""
    order = sorted(range(len(examples)), key=lambda i: _hash(examples[i].prompt, seed))
    return [examples[i] for i in sorted(order[:count])]


def _hash(prompt: str, seed: int) -> int:
    return zlib.crc32(f"{seed}/{prompt}".encode())


def _by_skill(examples: Iterable[Example], rl_skill: str, config: TaskConfig) -> dict[str, tuple[Example, ...]]:
    """Held-out examples per skill, the RL skill first, the others in the order in which they appear."""
    skills = {rl_skill: list[Example]()}
    for example in examples:
        skills.setdefault(example.skill, []).append(example)
    if not skills[rl_skill]:
        got = f"the skills {', '.join(sorted(skill for skill, rows in skills.items() if rows))}"
        fix = "add such rows to the held-out file, or leave skill_column unset"
        why = "there would be no telling whether training helped"
        raise DataError(f"no held-out row is of the skill that is trained, {rl_skill!r}", got=got, why=why, fix=fix)
    return {skill: tuple(_sample(rows, config.eval_size, config.task_seed)) for skill, rows in skills.items()}


def uses_chat_template(config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether prompts are written with the tokenizer's chat template; by default if the tokenizer has one."""
    return bool(tokenizer.chat_template) if config.chat_template is None else config.chat_template


def prompt_text(value: Any, config: TaskConfig, tokenizer: PreTrainedTokenizerBase, *, where: str) -> str:
    """The text to tokenize, from a text or chat messages of a prompt column; `where` is how errors name its row.

    With a chat template, a text is one user message; a last message of the assistant is continued.

    Raises:
        DataError: the prompt is empty, or neither a text nor messages.
        ConfigError: messages, and no chat template to render them with.
    """
    messages = _messages(value, where)
    if not uses_chat_template(config, tokenizer):
        if not isinstance(value, str):
            what = f"{where} holds chat messages, and no chat template is used"
            why = "only a template says how a model expects messages to be written"
            fix = "use a tokenizer with a chat template, or a column of plain text"
            raise ConfigError(what, got=f"chat_template={config.chat_template}", why=why, fix=fix)
        return f"{config.system_prompt}\n\n{value}" if config.system_prompt else value
    if config.system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    continued = messages[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not continued, continue_final_message=continued
        )
    except Exception as error:  # no template, or a jinja error of its own, e.g. for a role
        roles = [message["role"] for message in messages]
        fix = "write the messages in the roles and the order that the template expects, or set chat_template=false"
        raise DataError(f"the chat template refuses {where}", got=roles, why=str(error), fix=fix) from error
    return str(text)


def _messages(value: Any, where: str) -> list[dict[str, str]]:
    """The value of a prompt column as a list of messages; refuses one with nothing in it."""
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if isinstance(messages, Sequence) and messages and all(map(_is_message, messages)):
        return [{"role": message["role"], "content": message["content"]} for message in messages]
    why = "a prompt is a text with something in it, or a list of messages with a role and a content"
    raise DataError(f"{where} has no prompt", got=brief(repr(value)), why=why, fix="remove or repair this row")


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    role, content = value.get("role"), value.get("content")
    return isinstance(role, str) and isinstance(content, str) and bool(content.strip() or role == "system")


def check_prompts(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, limit: int | None, new_tokens: int, of: str = ""
) -> int:
    """Refuse prompts that are empty, cannot be tokenized, or leave no room for a completion of `new_tokens`.

    `limit` is for both together; None: no limit. `of`: whose prompts. Returns the tokens of the longest prompt.

    Raises:
        DataError: the first prompt that does not work, by its row.
    """
    longest, room = 0, None if limit is None else limit - new_tokens
    for row, example in enumerate(examples, start=1):
        try:
            length = len(tokenizer(example.prompt, add_special_tokens=False)["input_ids"])  # pyright: ignore
            what, why = f"{of}prompt {row} has no tokens", "a model cannot continue an empty prompt"
        except Exception as error:  # a tokenizer may raise any kind
            length, what, why = 0, f"{of}prompt {row} cannot be tokenized", f"{type(error).__name__}: {error}"
        if room is not None and length > max(0, room):
            what = f"{of}prompt {row} is too long: {length} tokens, and the limit is {max(0, room)}"
            why = f"there is room for {limit} tokens, and a completion may take {new_tokens} of them"
        elif length > 0:
            longest = max(longest, length)
            continue
        fix = "remove or repair this row, or change max_completion_length (of verl also max_prompt_length)"
        raise DataError(what, got=brief(repr(example.prompt)), why=why, fix=fix)
    return longest


def chat_cautions(config: TaskConfig, tokenizer: PreTrainedTokenizerBase, stop: Iterable[int]) -> tuple[str, ...]:
    """A caution if the token that ends an answer in the chat template is not among those that end a completion."""
    end = turn_end(tokenizer) if uses_chat_template(config, tokenizer) else ()
    if not end or end[0] in set(stop):
        return ()
    mark, others = (str(tokenizer.convert_ids_to_tokens(ids)) for ids in (end[0], sorted(stop)))
    return (
        f"the chat template ends an answer with {mark}, and completions end with {others}: answers go on past their "
        f"end until they are cut. Make {mark} the tokenizer's end token, or add it to eos_token_id in the model's "
        "generation_config.json.",
    )
