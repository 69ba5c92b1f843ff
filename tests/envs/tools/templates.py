"""Chat templates of the families, cut down to an assistant's message with calls.

Each writes `content` and `calls`, a list of objects with `name`, `arguments` and `id`, as the
family's own template does, without the token that ends the turn.
"""

from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils.chat_template_utils import _compile_jinja_template

from hone.envs.session import ToolCall
from hone.envs.tools.formats.json_calls import deepseek_mark

BEGIN, SEP, END = map(deepseek_mark, ("tool call begin", "tool sep", "tool call end"))
ALL, ALL_END = map(deepseek_mark, ("tool calls begin", "tool calls end"))

PYTHON_VALUE = (
    '{%- macro value(x) -%}{%- if x is string -%}{{ "\'" + x + "\'" }}{%- elif x is none -%}None'
    "{%- elif x is sameas true -%}True{%- elif x is sameas false -%}False"
    "{%- else -%}{{ x | tojson }}{%- endif -%}{%- endmacro -%}"
)
PYTHON_CALL = (
    "{{ c.name }}({% for k, v in c.arguments.items() %}{{ k }}={{ value(v) }}"
    "{{ ', ' if not loop.last }}{% endfor %})"
)
TEXT_OR_JSON = "{{ v if v is string else v | tojson }}"

TEMPLATES = {
    "hermes": "{{ content }}{% for c in calls %}"
    "{{ '\n' if content or not loop.first }}<tool_call>\n"
    '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}\n</tool_call>{% endfor %}',
    "qwen3_coder": "{{ content }}{% for c in calls %}\n\n<tool_call>\n<function={{ c.name }}>\n"
    "{% for k, v in c.arguments.items() %}<parameter={{ k }}>\n"
    f"{TEXT_OR_JSON}\n</parameter>\n{{% endfor %}}</function>\n</tool_call>{{% endfor %}}",
    "seed_oss": "{{ content }}{% for c in calls %}<seed:tool_call>\n<function={{ c.name }}>\n"
    "{% for k, v in c.arguments.items() %}<parameter={{ k }}>"
    f"{TEXT_OR_JSON}</parameter>\n{{% endfor %}}</function>\n</seed:tool_call>{{% endfor %}}",
    "llama3_json": "{{ content }}{% for c in calls %}{{ '; ' if not loop.first }}"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}{% endfor %}',
    "llama3_tag": "{{ content }}<|python_tag|>{% for c in calls %}{{ '; ' if not loop.first }}"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}{% endfor %}',
    "mistral": "{{ content }}[TOOL_CALLS][{% for c in calls %}{{ ', ' if not loop.first }}"
    '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% endfor %}]",
    "mistral_args": "{{ content }}{% for c in calls %}[TOOL_CALLS]{{ c.name }}[ARGS]"
    "{{ c.arguments | tojson }}{% endfor %}",
    "mistral_call_id": "{{ content }}{% for c in calls %}[TOOL_CALLS]{{ c.name }}"
    "[CALL_ID]{{ c.id }}[ARGS]{{ c.arguments | tojson }}{% endfor %}",
    "deepseek_v3": f"{{{{ content }}}}{ALL}{{% for c in calls %}}{{{{ '\n' if not loop.first }}}}"
    f"{BEGIN}function{SEP}{{{{ c.name }}}}\n```json\n{{{{ c.arguments | tojson }}}}\n```{END}"
    f"{{% endfor %}}{ALL_END}",
    "deepseek_v31": f"{{{{ content }}}}{ALL}{{% for c in calls %}}"
    f"{BEGIN}{{{{ c.name }}}}{SEP}{{{{ c.arguments | tojson }}}}{END}{{% endfor %}}{ALL_END}",
    "glm45": "{{ content }}{% for c in calls %}\n<tool_call>{{ c.name }}\n"
    "{% for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    f"<arg_value>{TEXT_OR_JSON}</arg_value>\n{{% endfor %}}</tool_call>{{% endfor %}}",
    "kimi_k2": "{{ content }}<|tool_calls_section_begin|>{% for c in calls %}<|tool_call_begin|>"
    "functions.{{ c.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
    "{{ c.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>",
    "phi4": "{{ content }}functools[{% for c in calls %}{{ ', ' if not loop.first }}"
    '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}{% endfor %}]',
    "phi4_marks": "{{ content }}<|tool_call|>[{% for c in calls %}{{ ', ' if not loop.first }}"
    '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}{% endfor %}]<|/tool_call|>',
    "granite": "{{ content }}<|tool_call|>[{% for c in calls %}{{ ', ' if not loop.first }}"
    '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}{% endfor %}]',
    "olmo3": PYTHON_VALUE + "{{ content }}<function_calls>\n{% for c in calls %}"
    f"{PYTHON_CALL}\n{{% endfor %}}</function_calls>",
    "lfm2": PYTHON_VALUE + "{{ content }}<|tool_call_start|>[{% for c in calls %}"
    f"{{{{ ', ' if not loop.first }}}}{PYTHON_CALL}{{% endfor %}}]<|tool_call_end|>",
    "pythonic": PYTHON_VALUE + "{{ content }}[{% for c in calls %}"
    f"{{{{ ', ' if not loop.first }}}}{PYTHON_CALL}{{% endfor %}}]",
    "pythonic_marks": PYTHON_VALUE + "{{ content }}<|python_start|>[{% for c in calls %}"
    f"{{{{ ', ' if not loop.first }}}}{PYTHON_CALL}{{% endfor %}}]<|python_end|>",
    "harmony": "<|channel|>commentary<|message|>{{ content }}<|end|>{% for c in calls %}"
    "<|start|>assistant<|channel|>commentary to=functions.{{ c.name }} <|constrain|>json<|message|>"
    "{{ c.arguments | tojson }}{{ '<|call|>' if not loop.last }}{% endfor %}",
    "harmony_template": "<|channel|>final<|message|>{{ content }}<|end|>{% for c in calls %}"
    "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>"
    "{{ c.arguments | tojson }}{{ '<|call|>' if not loop.last }}{% endfor %}",
}
"""Templates by the name of the format, with a suffix where a format has several ways of writing."""
FORMAT_OF = {
    "seed_oss": "qwen3_coder", "llama3_tag": "llama3_json", "mistral_args": "mistral",
    "mistral_call_id": "mistral", "deepseek_v31": "deepseek_v3", "phi4_marks": "phi4",
    "pythonic_marks": "pythonic", "harmony_template": "harmony",
}  # fmt: skip
"""The format of a template, where its name is not that of the format."""
WHOLE_TURN = {"llama3_json", "pythonic"}
"""Templates whose turn has either content or calls."""
WRITES_IDS = {"mistral", "mistral_call_id"}
PYTHONIC = {"olmo3", "lfm2", "pythonic", "pythonic_marks"}
AS_TEXT = {"qwen3_coder", "seed_oss", "glm45"}
"""Templates that write a text without quotes."""


def written(template: str, content: str, calls: list[ToolCall]) -> str:
    """A turn of the family's assistant."""
    compiled = _compile_jinja_template(TEMPLATES[template])
    assert isinstance(compiled.environment, ImmutableSandboxedEnvironment)
    return compiled.render(content=content, calls=calls)
