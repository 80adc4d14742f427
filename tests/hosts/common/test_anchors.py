"""What every loop checks of its anchors: the KL that starts at 0 or the reason, prompts, tokens."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from klamp.config.teacher import TeacherConfig
from klamp.errors import KLWarning, ModelError
from klamp.hosts.common.anchors import active_dropouts, check_tokens, likely_reasons, no_prompt, prefix_kl
from klamp.scoring.model_parts import PrefixKL


def test_why_the_kl_is_not_zero_at_the_start() -> None:
    plain = nn.Linear(2, 2)
    dropping = nn.Sequential(plain, nn.Dropout(0.1))
    for clean in (plain, nn.Sequential(plain, nn.Dropout(0.0))):
        assert likely_reasons(clean, None, adapter=False) == []
    assert "dropout (1 layers" in likely_reasons(dropping, plain, adapter=True)[0]
    assert likely_reasons(dropping.eval(), plain, adapter=True) == []
    assert "torch.float64" in likely_reasons(plain, nn.Linear(2, 2).double(), adapter=False)[0]
    assert "adapter that is not zero" in likely_reasons(plain, None, adapter=True)[0]
    other = nn.Linear(2, 2)
    assert "loaded from a path" in likely_reasons(plain, other, adapter=False)[0]
    assert likely_reasons(plain, other, adapter=False, loaded=False) == likely_reasons(plain, other, adapter=True) == []


def test_dropout_that_a_layer_keeps_as_a_number_is_named() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    policy = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=9, attention_dropout=0.1)).train()
    (reason,) = likely_reasons(policy, None, adapter=False)
    assert "attention_dropout above 0" in reason and "disable_dropout does not" in reason
    for dropout in active_dropouts(policy):
        setattr(dropout.holder, dropout.name, 0.0)
    assert (policy.model.layers[0].self_attn.attention_dropout, likely_reasons(policy, None, adapter=False)) == (0, [])


def tokenizer(*tokens: str, end: str = "<eos>") -> Any:
    ids = {token: i for i, token in enumerate(tokens)}
    return SimpleNamespace(get_vocab=lambda: ids, eos_token=end, eos_token_id=ids.get(end))


def test_a_kl_at_each_prefix_is_the_one_that_is_asked_for() -> None:
    assert prefix_kl(TeacherConfig(teacher_model="x", teacher_estimator="k3")) is None
    whole = TeacherConfig(teacher_model="x", teacher_estimator="exact", teacher_direction="js")
    assert prefix_kl(whole) == PrefixKL(direction="js", top_k=None)
    fields: dict[str, Any] = {"teacher_head": "union", "teacher_tail": "bucket", "teacher_direction": "forward"}
    with pytest.warns(KLWarning, match="bucket"):
        head = TeacherConfig(teacher_model="x", teacher_estimator="topk", teacher_top_k=7, **fields)
    assert prefix_kl(head) == PrefixKL(direction="forward", top_k=7, head="union", tail="bucket")


def test_a_row_without_its_prompt_names_the_columns_that_there_are() -> None:
    error = no_prompt("hint", ["prompt", "answer"])
    assert "no 'hint' for the teacher" in str(error) and error.got == "the columns answer, prompt"
    assert no_prompt("hint", []).got == "the columns none"


def test_other_ids_are_refused_by_the_first_of_them() -> None:
    with pytest.raises(ModelError, match="another tokenizer") as error:
        check_tokens(tokenizer("b", "a", "<eos>"), tokenizer("a", "b", "<eos>"), name="T")
    assert str(error.value.got) == "2 of 3 tokens have another id at T, the first 'a'"


def test_another_end_and_no_tokenizer_are_cautioned() -> None:
    ours = tokenizer("a", "<eos>", "<end>")
    with pytest.warns(KLWarning, match="ends an answer with '<end>' and the policy with '<eos>'"):
        check_tokens(tokenizer("a", "<eos>", "<end>", end="<end>"), ours, name="T")
    with pytest.warns(KLWarning, match="T has no tokenizer beside it"):
        check_tokens(None, ours, name="T")


def chat(mark: str) -> Any:
    def render(messages: Any, **options: Any) -> str:
        return "".join(f"{mark}{each['content']}" for each in messages)

    return SimpleNamespace(**vars(tokenizer("a", "<eos>")), apply_chat_template=render)


@pytest.mark.filterwarnings("error")
def test_another_chat_template_of_a_teacher_is_cautioned_and_the_same_tokens_are_taken_in_silence() -> None:
    with pytest.warns(KLWarning, match="The chat templates .* '#Q.* policy and '@Q.* For T: use a teacher"):
        check_tokens(chat("@"), chat("#"), name="T")
    check_tokens(chat("@"), chat("#"), name="T", who="reference")
    check_tokens(chat("#"), chat("#"), name="T")
    check_tokens(tokenizer("a", "b", "<eos>", "more"), tokenizer("a", "b", "<eos>"), name="T")
