"""Chat templates of families that call tools, cut down to what decides how a turn goes on.

Special tokens are written in ASCII. Each has a list of the tokens that end a turn of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Family:
    """A template with the tokens that end a turn, of which the first is the tokenizer's."""

    template: str
    ends: tuple[str, ...]

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """One token a printable ASCII character, and those of the ends."""
        alphabet = ["\n", *map(chr, range(32, 127))]
        words = ["<pad>", *self.ends, *alphabet]
        tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(words)}))
        tokenizer.add_special_tokens([*self.ends])
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        made = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token=self.ends[0], pad_token="<pad>"
        )
        # A line break after a block is dropped, as in templates on disk.
        made.chat_template = self.template.replace("%}\n", "%}{{ '\n' }}")
        return made


_DEEPSEEK = (
    "{{% set ns = namespace(tool=false, first=true) %}}{{% for m in messages %}}"
    "{{% if m.role == 'user' %}}<User>{{{{ m.content }}}}<Assistant>{{% set ns.tool = false %}}"
    "{{% elif m.role == 'assistant' %}}{{% set said = m.content.split('</think>')[-1] %}}"
    "{{% if ns.tool %}}<outputs_end>{{% endif %}}{{% set ns.tool = false %}}{{{{ said }}}}"
    "{{% if m.tool_calls %}}{{% set ns.first = true %}}<calls>{{% for c in m.tool_calls %}}<call>"
    "{arguments}</call>{{% endfor %}}</calls>{{% endif %}}<eos>"
    "{{% else %}}{{% set ns.tool = true %}}"
    "{{% if ns.first %}}<outputs>{{% set ns.first = false %}}{{% else %}}\n{{% endif %}}"
    "<output>{{{{ m.content }}}}</output>{{% endif %}}{{% endfor %}}"
    "{{% if ns.tool %}}<outputs_end>{{% endif %}}"
    "{{% if add_generation_prompt and not ns.tool %}}<think>\n{{% endif %}}"
)
DEEPSEEK_R1 = Family(
    _DEEPSEEK.format(arguments="{{ c.function.name }}<sep>{{ c.function.arguments | tojson }}"),
    ("<eos>",),
)
"""Drops reasoning, and opens a list of answers only after a message with calls."""
_END = "{% if ns.tool %}<outputs_end>{% endif %}"
CLOSES_LATE = Family(
    DEEPSEEK_R1.template.replace(_END, _END.replace("ns.tool", "ns.tool and not m.tool_calls"), 1),
    ("<eos>",),
)
"""As DeepSeek's own: the end of a list of answers is gone once further calls follow it."""
DEEPSEEK_V31 = Family(
    _DEEPSEEK.format(arguments="{{ c.function.name + '<sep>' + c.function.arguments }}"), ("<eos>",)
)
"""Takes the arguments of calls as a text alone."""
DEEPSEEK_V32 = Family(
    "{% set ns = namespace(num=0, of=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}<User>{{ m.content }}<Assistant>{% if add_generation_prompt and "
    "loop.last %}<think>{% endif %}"
    "{% elif m.role == 'assistant' %}{% set ns.of = (m.tool_calls or []) | length %}"
    "{% set ns.num = 0 %}{{ m.reasoning_content }}</think>{{ m.content }}"
    "{% for c in m.tool_calls %}<invoke {{ c.function.name }}>{% for k, v in "
    "c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}</invoke>{% endfor %}<eos>"
    "{% else %}{% set ns.num = ns.num + 1 %}{% if ns.num == 1 %}\n\n<results>{% endif %}"
    "\n<result>{{ m.content }}</result>{% if ns.num == ns.of %}\n</results>\n\n<think>{% endif %}"
    "{% endif %}{% endfor %}",
    ("<eos>",),
)
"""Closes a list of answers once there are as many as calls."""
GLM = Family(
    "[gMASK]{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|assistant|>"
    "{% if m.reasoning_content and loop.index0 > ns.last %}\n<think>{{ m.reasoning_content }}"
    "</think>{% else %}\n<think></think>{% endif %}{% if m.content %}\n{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls %}\n<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    "{% else %}{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    ("<|endoftext|>", "<|user|>", "<|observation|>"),
)
"""Adds an empty reasoning, and ends a turn with the token that opens the next message."""
MISTRAL = Family(
    "{% set said = namespace(number=0) %}{% for m in messages %}"
    "{% if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (said.number % 2 == 0) %}"
    "{{ raise_exception('conversation roles must alternate') }}{% endif %}"
    "{% set said.number = said.number + 1 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}"
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>"
    "{% else %}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]"
    "{% endif %}{% endfor %}",
    ("</s>",),
)
GEMMA4 = Family(
    "<bos>{% set ns = namespace(prev='', role='') %}{% for m in messages %}"
    "{% if m.role != 'tool' %}{% set ns.prev = '' %}"
    "{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{% if not (role == 'model' and ns.role == 'model') %}<|turn>{{ role }}\n{% endif %}"
    "{% set ns.role = role %}{% for c in m.tool_calls %}"
    "<|tool_call>call:{{ c.function.name + '{' }}"
    '{% for k, v in c.function.arguments.items() %}{{ k }}:<|"|>{{ v }}<|"|>{% endfor %}}'
    "<tool_call|>{% set ns.prev = 'call' %}{% endfor %}"
    "{% if m.tool_calls %}{% set scan = namespace(stopped=false) %}"
    "{% for after in messages[loop.index:] %}{% if after.role != 'tool' %}"
    "{% set scan.stopped = true %}{% elif not scan.stopped %}"
    "{% set found = namespace(name=after.name or 'unknown') %}"
    "{% for c in m.tool_calls %}{% if c.id == after.tool_call_id %}"
    "{% set found.name = c.function.name %}{% endif %}{% endfor %}"
    '<|tool_response>response:{{ found.name }}{value:<|"|>{{ after.content }}<|"|>}'
    "<tool_response|>{% set ns.prev = 'response' %}{% endif %}{% endfor %}{% endif %}"
    "{{ m.content | trim }}{% if ns.prev == 'call' %}<|tool_response>"
    "{% elif ns.prev != 'response' or m.content %}<turn|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and ns.prev == '' %}<|turn>model\n"
    "{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}{% endif %}",
    ("<eos>", "<turn|>", "<|tool_response>"),
)
"""Answers stand within the policy's own turn; the token that ends it before them opens them."""
MINIMAX = Family(
    "{% set ns = namespace(called=false) %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "]~b]ai\n{{ m.content.split('</think>')[-1] }}{% if m.tool_calls %}\n<minimax:tool_call>\n"
    '{% for c in m.tool_calls %}<invoke name="{{ c.function.name }}">\n'
    '{% for k, v in c.function.arguments.items() %}<parameter name="{{ k }}">{{ v }}</parameter>\n'
    "{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>{% set ns.called = true %}{% else %}"
    "{% set ns.called = false %}{% endif %}[e~[\n{% elif m.role == 'tool' %}"
    "{% if not ns.called %}{{ raise_exception('no previous message with a call') }}{% endif %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}]~b]tool{% endif %}"
    "\n<response>{{ m.content }}</response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}[e~[\n{% endif %}"
    "{% else %}]~b]user\n{{ m.content }}[e~[\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}]~b]ai\n<think>\n{% endif %}",
    ("[e~[",),
)
COHERE = Family(
    "{% set ns = namespace(number=0, seen=[]) %}{% for m in messages %}"
    "{% if m.role == 'user' %}<|TURN|><|USER|>{{ m.content }}<|END|>"
    "{% elif m.role == 'assistant' %}<|TURN|><|BOT|>{% if m.tool_calls %}"
    "<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|><|START_ACTION|>["
    '{% for c in m.tool_calls %}{"tool_call_id": "{{ ns.number }}", "tool_name": '
    '"{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{% set ns.number = ns.number + 1 %}{{ ', ' if not loop.last }}"
    "{% endfor %}]<|END_ACTION|><|END|>"
    "{% else %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|><|END|>{% endif %}"
    "{% elif m.tool_call_id not in ns.seen %}<|TURN|><|SYSTEM|>["
    "{{ [m.tool_call_id, m.content] | tojson }}{% set scan = namespace(stopped=false) %}"
    "{% for other in messages[loop.index:] %}{% if other.role != 'tool' %}"
    "{% set scan.stopped = true %}{% elif not scan.stopped %}, "
    "{{ [other.tool_call_id, other.content] | tojson }}"
    "{% set ns.seen = ns.seen + [other.tool_call_id] %}{% endif %}{% endfor %}]<|END|>"
    "{% endif %}{% endfor %}<|TURN|><|BOT|>",
    ("<|END|>",),
)
"""Writes the header of the next turn always, and marks around a turn without calls."""
NEMOTRON = Family(
    "{% set shown = messages[:-1] if messages[-1].role == 'assistant' else messages %}"
    "<S10>System\n\n{% for m in shown %}{% if m.role == 'user' %}<S11>User\n{{ m.content }}\n"
    "{% elif m.role == 'tool' %}{% if shown[loop.index0 - 1].role != 'tool' %}"
    "<S11>User\n<TOOL_RESPONSE>[{% endif %}{{ m.content }}"
    "{% if loop.last or shown[loop.index0 + 1].role != 'tool' %}]</TOOL_RESPONSE>\n\n"
    "{% else %}, {% endif %}"
    "{% else %}<S11>Assistant\n{{ m.content.split('</think>')[-1].strip() }}{% if m.tool_calls %}"
    '<TOOLCALL>[{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", '
    "\"arguments\": {{ c.function.arguments | tojson }}}{{ ', ' if not loop.last }}{% endfor %}]"
    "</TOOLCALL>{% endif %}\n<S12>\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<S11>Assistant\n<think>\n\n{% endif %}",
    ("<S12>",),
)
_QWEN3 = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}"
    '{{ \'\n\' if m.content or not loop.first }}<tool_call>\n{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n'
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
)
QWEN3_WITHOUT_THINKING = Family(
    _QWEN3 + "<think>\n\n</think>\n\n{% endif %}", ("<|im_end|>", "<|endoftext|>")
)
"""The header has an empty reasoning, which earlier turns lack."""
ONE_CALL = Family(
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}<eot>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    ("<eot>",),
)
"""As Llama 3's: a message has one call."""
ENDS_TEXTS = Family(_QWEN3 + "{% else %}<|endoftext|>{% endif %}", ("<|im_end|>", "<|endoftext|>"))
"""As Phi's: without the header of a turn the text ends."""
REWRITES = Family(
    "{% set called = messages | selectattr('tool_calls', 'defined') | list | length %}"
    "{% if called %}(tools were called){% endif %}" + _QWEN3 + "{% endif %}",
    ("<|im_end|>",),
)
LEAVES_OUT = Family(
    "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{{ m.tool_calls | tojson if m.tool_calls }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ("<|im_end|>",),
)
