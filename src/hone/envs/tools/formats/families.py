"""How each family of models writes calls of tools, and the texts by which its chat template is
recognised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hone.envs.tools.formats import (
    gemma_calls,
    invoke_calls,
    json_calls,
    json_lists,
    python_calls,
    xml_calls,
)
from hone.envs.tools.formats import harmony as gpt_oss
from hone.envs.tools.formats.found import Found, Schemas
from hone.envs.tools.formats.invoke_calls import DSML
from hone.envs.tools.formats.json_calls import deepseek_mark
from hone.types import Message

__all__ = ["FORMATS", "ToolFormat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One family's way of writing calls of tools."""

    read: Callable[[str, Schemas, Found], None]
    """Finds the calls of a turn, without its reasoning. Notes malformed calls, and raises
    nothing but TooManyErrors."""
    template: tuple[tuple[str, ...], ...]
    """Texts by which a chat template is recognised: all texts of one of these tuples."""
    marks: tuple[str, ...] = ()
    """Marks of calls. One that is left outside of all calls shows that a call was not read."""
    around: tuple[str, ...] = ()
    """Marks around a list of calls, which belong to no single one. They are removed from the text.
    Without any call in the turn they show that one was not read."""
    framing: tuple[str, ...] = ()
    """Marks around what is said to the user. They are removed from the text."""
    reasoning: tuple[str, str] | None = ("<think>", "</think>")
    """Marks around the reasoning at the start of a turn. None: `read` finds it."""
    needs_ids: bool = False
    """The template refuses the answer of a tool without the id of its call."""
    answers: Callable[[Sequence[Message]], str] | None = None
    """Writes the answers of tools and the header of the next turn, for templates that can write
    neither after a turn whose calls are text."""


FORMATS: dict[str, ToolFormat] = {
    "deepseek_v32": ToolFormat(
        read=invoke_calls.deepseek_v32,
        template=((DSML,),),
        marks=tuple(
            f"<{slash}{DSML}{tag}" for tag in ("invoke", "parameter") for slash in ("", "/")
        ),
        around=tuple(
            f"<{slash}{DSML}{tag}>"
            for tag in ("function_calls", "tool_calls")
            for slash in ("", "/")
        ),
    ),
    "deepseek_v3": ToolFormat(
        read=json_calls.deepseek_v3,
        template=((deepseek_mark("tool call begin"),),),
        marks=(
            deepseek_mark("tool call begin"),
            deepseek_mark("tool sep"),
            deepseek_mark("tool call end"),
        ),
        around=(deepseek_mark("tool calls begin"), deepseek_mark("tool calls end")),
    ),
    "kimi_k2": ToolFormat(
        read=json_calls.kimi_k2,
        template=(("<|tool_call_begin|>",),),
        marks=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "gemma4": ToolFormat(
        read=gemma_calls.gemma4,
        template=(("<|tool_call>",),),
        marks=("<|tool_call>", "<tool_call|>"),
        reasoning=("<|channel>thought", "<channel|>"),
    ),
    "functiongemma": ToolFormat(
        read=gemma_calls.functiongemma,
        template=(("<start_function_call>",),),
        marks=("<start_function_call>", "<end_function_call>"),
    ),
    "cohere": ToolFormat(
        read=json_lists.cohere,
        template=(("<|START_ACTION|>",),),
        marks=("<|START_ACTION|>", "<|END_ACTION|>"),
        framing=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        reasoning=("<|START_THINKING|>", "<|END_THINKING|>"),
        needs_ids=True,
    ),
    "minimax_m2": ToolFormat(
        read=invoke_calls.minimax_m2,
        template=(("<minimax:tool_call>",),),
        marks=("<invoke", "</invoke>", "<parameter name=", "</parameter>"),
        around=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "step3": ToolFormat(
        read=invoke_calls.step3,
        template=(("<steptml:invoke",),),
        marks=("<steptml:", "</steptml:"),
        around=(
            "<\uff5ctool_call_begin\uff5c>function<\uff5ctool_sep\uff5c>",
            *(
                f"<\uff5c{words}\uff5c>"
                for words in (
                    "tool_calls_begin",
                    "tool_calls_end",
                    "tool_call_begin",
                    "tool_call_end",
                    "tool_sep",
                )
            ),
        ),
    ),
    "apertus": ToolFormat(
        read=json_lists.apertus,
        template=(("<|tools_prefix|>",),),
        marks=("<|tools_prefix|>", "<|tools_suffix|>"),
        reasoning=("<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    "internlm": ToolFormat(
        read=json_lists.internlm,
        template=(("<|action_start|>",),),
        marks=("<|action_start|>", "<|action_end|>"),
    ),
    "mistral": ToolFormat(
        read=json_calls.mistral,
        template=(("[TOOL_CALLS]",),),
        marks=("[TOOL_CALLS]", "[ARGS]"),
        reasoning=("[THINK]", "[/THINK]"),
        needs_ids=True,
    ),
    "harmony": ToolFormat(
        read=gpt_oss.harmony,
        template=(("<|channel|>", "<|message|>"),),
        marks=("to=functions.",),
        framing=("<|start|>assistant",),
        reasoning=None,
        answers=gpt_oss.answers,
    ),
    "glm45": ToolFormat(
        read=xml_calls.glm45,
        template=(("<arg_key>",),),
        marks=("<tool_call>", "</tool_call>", "<arg_key>"),
    ),
    "longcat": ToolFormat(
        read=xml_calls.longcat,
        template=(("<longcat_tool_call>",),),
        marks=("<longcat_tool_call>", "</longcat_tool_call>", "<longcat_arg_key>"),
        reasoning=("<longcat_think>", "</longcat_think>"),
    ),
    "qwen3_coder": ToolFormat(
        read=xml_calls.qwen3_coder,
        template=(("<function=", "<parameter="),),
        marks=("<function=", "</function>", "<parameter=", "</parameter>"),
        around=("</tool_call>", "</seed:tool_call>"),
    ),
    "olmo3": ToolFormat(
        read=python_calls.olmo3,
        template=(("<function_calls>",),),
        marks=("<function_calls>", "</function_calls>"),
    ),
    "lfm2": ToolFormat(
        read=python_calls.lfm2,
        template=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
        marks=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "pythonic": ToolFormat(
        read=python_calls.pythonic,
        template=(("<|python_start|>",), ("func_name1(params_name1=",)),
        marks=("<|python_start|>",),
        around=("<|python_end|>",),
    ),
    "phi4": ToolFormat(
        read=json_calls.phi4,
        template=(("functools",), ("<|tool|>", "<|/tool|>")),
        marks=("<|tool_call|>", "<|/tool_call|>"),
    ),
    "granite": ToolFormat(
        read=json_calls.granite,
        template=(("<|tool_call|>",),),
        marks=("<|tool_call|>", "<tool_call>"),
    ),
    "nemotron": ToolFormat(
        read=json_lists.nemotron,
        template=(("<TOOLCALL>",), ("<toolcall>",)),
        marks=("<TOOLCALL>", "</TOOLCALL>", "<toolcall>", "</toolcall>"),
    ),
    "hunyuan": ToolFormat(
        read=json_lists.hunyuan,
        template=(("<tool_calls>",),),
        marks=("<tool_calls>", "</tool_calls>"),
    ),
    "ernie45": ToolFormat(
        read=json_calls.hermes,
        template=(("<tool_call>", "<response>"),),
        marks=("<tool_call>", "</tool_call>"),
        framing=("<response>", "</response>"),
    ),
    "xlam": ToolFormat(read=json_lists.xlam, template=(("make calls in a single JSON array",),)),
    "hermes": ToolFormat(
        read=json_calls.hermes,
        template=(("<tool_call>",),),
        marks=("<tool_call>", "</tool_call>"),
    ),
    "llama3_json": ToolFormat(
        read=json_calls.llama3_json,
        template=(("<|python_tag|>",), ('{"name": function name, "parameters":',)),
        marks=("<|python_tag|>",),
    ),
}
"""The formats by name. The first one that a chat template shows is its format: marks that other
families use with another meaning come last."""
