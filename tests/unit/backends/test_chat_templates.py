import json

import pytest

from gateway.backends.llm.chat_templates import ChatTemplate, PromptError, load

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "<b>&{{ 7 * 7 }}"},
]


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        (
            "chatml",
            (
                "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
                "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\n<b>&{{ 7 * 7 }}<|im_end|>\n"
                "<|im_start|>assistant\n"
            ),
        ),
        (
            "llama3",
            (
                "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
                "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
                "<|start_header_id|>user<|end_header_id|>\n\n<b>&{{ 7 * 7 }}<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n"
            ),
        ),
        ("mistral", "[INST] Be brief.\n\nHi [/INST] Hello</s>[INST] <b>&{{ 7 * 7 }} [/INST]"),
    ],
)
def test_what_is_built_in(name, prompt):
    assert load(name).prompt(TURNS) == prompt


def test_a_system_prompt_alone_is_not_lost():
    assert load("mistral").prompt(TURNS[:1]) == "[INST] Be brief. [/INST]"


def test_system_prompts_stand_before_the_next_user_wherever_they_come():
    said = [("system", "a"), ("assistant", "b"), ("system", "c"), ("user", "d"), ("user", "e"), ("system", "f")]
    prompt = load("mistral").prompt([{"role": role, "content": content} for role, content in said])
    assert prompt == " b</s>[INST] a\n\nc\n\nd [/INST][INST] e [/INST][INST] f [/INST]"


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral"])
@pytest.mark.timeout(20)  # where each copied all before it, these would take minutes
def test_many_messages_cost_no_more_than_their_length(name):
    prompt = load(name).prompt([{"role": "system", "content": "x" * 1000}] * 30_000)
    assert prompt.count("x") == 30_000_000


PUBLISHED = """{{ bos_token }}{% for m in messages %}
    {%- if m['role'] == 'system' %}{{ raise_exception('No system prompts here') }}{% endif %}
    {%- if m.role == 'assistant' %}{% continue %}{% endif %}
{{ m['content'] | tojson }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}A:{% endif %}
"""


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>", "lstrip": False}])
@pytest.mark.parametrize(
    "template", [PUBLISHED, [{"name": "tool_use", "template": "x"}, {"name": "default", "template": PUBLISHED}]]
)
def test_a_tokenizers_configuration_as_publishers_ship_it(tmp_path, eos, template):
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": template, "bos_token": "<s>", "eos_token": eos}))
    assert load(str(path)).prompt(TURNS[1:]) == '"Hi"</s>\n"<b>&{{ 7 * 7 }}"</s>\nA:'


def test_a_bare_template_takes_its_tokens_from_the_file_beside_it(tmp_path):
    path = tmp_path / "chat_template.jinja"
    path.write_text("{{ messages[0].content }}{{ eos_token }}\n")
    assert load(str(path)).prompt(TURNS) == "Be brief."
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    assert load(str(path)).prompt(TURNS) == "Be brief.<end>"


def test_the_templates_own_refusal_is_told(tmp_path):
    with pytest.raises(PromptError, match="No system prompts here"):
        ChatTemplate(PUBLISHED).prompt(TURNS)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[9].content.upper() }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_what_a_template_may_not_do_is_no_prompt(source):
    with pytest.raises(PromptError):
        ChatTemplate(source).prompt(TURNS)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("absent.jinja", None, "No such file.*built in are chatml, llama3, mistral"),
        ("bad.jinja", "{% for %}", "not valid"),
        ("bad.json", "{", "bad.json"),
        ("empty.json", "{}", "holds no chat_template"),
        ("list.json", "[]", "holds no chat_template"),
        ("bytes.jinja", b"\xff", "bytes.jinja"),
    ],
)
def test_a_file_that_is_no_template(tmp_path, name, text, told):
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=told):
        load(str(path))
