"""Chat templates of the families, cut down to an assistant's message with calls.

Each writes `content` and `calls`, a list of objects with `name`, `arguments` and `id`, as the
family's own template does, without the token that ends the turn.
"""

from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils.chat_template_utils import _compile_jinja_template

from hone.envs.session import ToolCall
from hone.envs.tools.formats.invoke_calls import DSML
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

JSON_CALL = '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
ALL_JSON_CALLS = f"{{% for c in calls %}}{{{{ ', ' if not loop.first }}}}{JSON_CALL}{{% endfor %}}"


def gemma(quote: str, opening: str, closing: str) -> str:
    """Arguments sorted by name, with keys without quotes and Python's way to write null."""
    value = (
        "{%- macro value(x) -%}{%- if x is string -%}{{ QUOTE + x + QUOTE }}"
        "{%- elif x is boolean -%}{{ 'true' if x else 'false' }}"
        "{%- elif x is mapping -%}{{ '{' }}{%- for k, v in x | dictsort -%}"
        "{{ ',' if not loop.first }}{{ k }}:{{ value(v) }}{%- endfor -%}{{ '}' }}"
        "{%- elif x is sequence -%}{{ '[' }}{%- for v in x -%}{{ ',' if not loop.first }}"
        "{{ value(v) }}{%- endfor -%}{{ ']' }}{%- else -%}{{ x }}{%- endif -%}{%- endmacro -%}"
    ).replace("QUOTE", f"'{quote}'")
    call = f"{opening}call:{{{{ c.name }}}}{{{{ value(c.arguments) }}}}{closing}"
    return f"{value}{{{{ content }}}}{{% for c in calls %}}{call}{{% endfor %}}"


def invoked(prefix: str, flag: str = "") -> str:
    """The calls of a turn as elements `invoke`."""
    return (
        f'{{% for c in calls %}}<{prefix}invoke name="{{{{ c.name }}}}">\n'
        f"{{% for k, v in c.arguments.items() %}}"
        f'<{prefix}parameter name="{{{{ k }}}}"{flag}>{TEXT_OR_JSON}</{prefix}parameter>\n'
        f"{{% endfor %}}</{prefix}invoke>\n{{% endfor %}}"
    )


IS_TEXT = " string=\"{{ 'true' if v is string else 'false' }}\""
STEP3 = [
    f"<\uff5c{words}\uff5c>"
    for words in (
        "tool_calls_begin",
        "tool_call_begin",
        "tool_sep",
        "tool_call_end",
        "tool_calls_end",
    )
]

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
    "glm47": "{{ content }}{% for c in calls %}<tool_call>{{ c.name }}"
    "{% for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key>"
    f"<arg_value>{TEXT_OR_JSON}</arg_value>{{% endfor %}}</tool_call>{{% endfor %}}",
    "longcat": "{{ content }}{% for c in calls %}<longcat_tool_call>{{ c.name }}\n"
    "{% for k, v in c.arguments.items() %}<longcat_arg_key>{{ k }}</longcat_arg_key>\n"
    f"<longcat_arg_value>{TEXT_OR_JSON}</longcat_arg_value>\n{{% endfor %}}</longcat_tool_call>"
    "{% endfor %}",
    "longcat_json": f"{{{{ content }}}}{{% for c in calls %}}<longcat_tool_call>\n{JSON_CALL}\n"
    "</longcat_tool_call>{% endfor %}",
    "gemma4": gemma('<|"|>', "<|tool_call>", "<tool_call|>"),
    "functiongemma": gemma("<escape>", "<start_function_call>", "<end_function_call>"),
    "cohere": "{{ content }}<|START_ACTION|>[\n{% for c in calls %}    "
    '{"tool_call_id": "{{ c.id }}", "tool_name": "{{ c.name }}", '
    '"parameters": {{ c.arguments | tojson }}}{{ "," if not loop.last }}\n{% endfor %}]'
    "<|END_ACTION|>",
    "apertus": "{{ content }}<|tools_prefix|>[{% for c in calls %}{{ ', ' if not loop.first }}"
    '{"{{ c.name }}": {{ c.arguments | tojson }}}{% endfor %}]<|tools_suffix|>',
    "hunyuan": f"{{{{ content }}}}<tool_calls>[{ALL_JSON_CALLS}]</tool_calls>",
    "minimax_m1": f"{{{{ content }}}}<tool_calls>\n{{% for c in calls %}}{JSON_CALL}\n"
    "{% endfor %}</tool_calls>",
    "nemotron": f"{{{{ content }}}}<TOOLCALL>[{ALL_JSON_CALLS}]</TOOLCALL>",
    "nemotron_mini": f"{{{{ content }}}}{{% for c in calls %}}<toolcall> {JSON_CALL} </toolcall>"
    "{% endfor %}",
    "internlm": f"{{{{ content }}}}{{% for c in calls %}}<|action_start|><|plugin|>\n{JSON_CALL}"
    "<|action_end|>{% endfor %}",
    "xlam": f"{{{{ content }}}}[{ALL_JSON_CALLS}]",
    "xlam_fence": f"{{{{ content }}}}```json\n[{ALL_JSON_CALLS}]\n```",
    "ernie45": "{% if content %}<response>\n{{ content }}\n</response>\n{% endif %}"
    f"{{% for c in calls %}}\n<tool_call>\n{JSON_CALL}\n</tool_call>\n{{% endfor %}}",
    "minimax_m2": "{{ content }}\n<minimax:tool_call>\n" + invoked("") + "</minimax:tool_call>",
    "deepseek_v32": f"{{{{ content }}}}\n\n<{DSML}function_calls>\n{invoked(DSML, IS_TEXT)}"
    f"</{DSML}function_calls>",
    "deepseek_v4": f"{{{{ content }}}}\n\n<{DSML}tool_calls>\n{{% for c in calls %}}"
    f'<{DSML}invoke name="{{{{ c.name }}}}">\n{{{{ c.arguments | tojson }}}}\n</{DSML}invoke>\n'
    f"{{% endfor %}}</{DSML}tool_calls>",
    "step3": f"{{{{ content }}}}{STEP3[0]}{{% for c in calls %}}{STEP3[1]}function{STEP3[2]}"
    '<steptml:invoke name="{{ c.name }}">{% for k, v in c.arguments.items() %}'
    f'<steptml:parameter name="{{{{ k }}}}">{TEXT_OR_JSON}</steptml:parameter>{{% endfor %}}'
    f"</steptml:invoke>{STEP3[3]}{{% endfor %}}{STEP3[4]}",
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
    "pythonic_marks": "pythonic", "harmony_template": "harmony", "glm47": "glm45",
    "minimax_m1": "hunyuan", "nemotron_mini": "nemotron", "xlam_fence": "xlam",
    "deepseek_v4": "deepseek_v32", "longcat_json": "longcat",
}  # fmt: skip
"""The format of a template, where its name is not that of the format."""
WHOLE_TURN = {"llama3_json", "pythonic", "xlam", "xlam_fence"}
"""Templates whose turn has either content or calls."""
WRITES_IDS = {"mistral", "mistral_call_id", "cohere"}
PYTHONIC = {"olmo3", "lfm2", "pythonic", "pythonic_marks"}
AS_TEXT = {"qwen3_coder", "seed_oss", "glm45", "glm47", "longcat", "minimax_m2", "step3"}
"""Templates that write a text without quotes."""
PLAIN_KEYS = {"gemma4", "functiongemma", "deepseek_v32"}
"""Templates that write any text, but keys without quotes."""


def written(template: str, content: str, calls: list[ToolCall]) -> str:
    """A turn of the family's assistant."""
    compiled = _compile_jinja_template(TEMPLATES[template])
    assert isinstance(compiled.environment, ImmutableSandboxedEnvironment)
    return compiled.render(content=content, calls=calls)
