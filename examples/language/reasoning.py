"""A task of reasoning-gym (pip install reasoning-gym): any of its data sets, scored by its own rules.

    klamp train --model FOLDER --task examples/language/reasoning.py:leg_counting

For another data set, add a function of its name.
"""

from __future__ import annotations

from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer

from klamp.lab.tasks import Example, Task, TaskConfig
from klamp.lab.tasks.files import prompt_text


def leg_counting(config: TaskConfig, tokenizer: Any) -> Task:
    """The data set `leg_counting`."""
    return gym_task("leg_counting", config, tokenizer)


def gym_task(name: str, config: TaskConfig, tokenizer: Any) -> Task:
    """The task of a data set; its first `eval_size` rows are held out, so that they stay the same at every size.

    The score is that of the data set's rules, for the text in the last <answer>...</answer>, or for the whole
    completion if it has no such tag.

    Args:
        name: of the data set.
        config: its sizes, its seed and how prompts are written are used.
        tokenizer: for the chat template.
    """
    size = (config.train_size or 4096) + config.eval_size
    data: Any = reasoning_gym.create_dataset(name, size=size, seed=config.task_seed)

    def example(entry: dict[str, Any]) -> Example:
        prompt = prompt_text(entry["question"], config, tokenizer, where=f"a question of {name}")
        answer = "" if entry["answer"] is None else str(entry["answer"])  # some data sets have many right answers
        return Example(prompt=prompt, answer=answer, skill=name, fields={**entry, "prompt": entry["question"]})

    def score(example: Example, completion: str) -> float:
        answer = extract_answer(completion)
        return data.score_answer(completion.strip() if answer is None else answer, entry=dict(example.fields))

    rows = [example(data[i]) for i in range(len(data))]
    held_out = rows[: config.eval_size]
    prompts = {each.prompt for each in held_out}
    train = tuple(each for each in rows[config.eval_size :] if each.prompt not in prompts)
    return Task(name=name, train=train, evaluation={name: tuple(held_out)}, rl_skill=name, score=score)
