"""The prompts of requests: messages, a text, or token ids, and how they become ids.

Ids are made once. The first messages of a session are rendered from the start, as rows of data are;
what a later request adds behind a turn is rendered by the `TurnRenderer`, as an environment's
observation is, and appended to the ids that are there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hone.data.chat import ARGUMENTS, TOOLS, Renderer, template_arguments
from hone.data.columns import Example
from hone.data.settings import DataConfig
from hone.data.template_check import RenderError
from hone.data.turns import TurnRenderer
from hone.door.calls import format_in, with_names
from hone.door.images import OpenedImage
from hone.door.refusal import Refusal
from hone.door.tree import Node, Place, path_of, sample_of
from hone.errors import UserError
from hone.families.tokens import is_of_tokenizers, unknown_token
from hone.images.parts import parts_in
from hone.images.reader import ImageReader, RowImage
from hone.model_input import TEXT, ModelInput
from hone.types import Message, Observation

__all__ = ["AskedPrompt", "ChatPrompt", "Prompts", "TextPrompt", "TokenPrompt", "message_key"]

_END_OF_THOUGHT = re.compile(r"</((?:\w+:)?think)>")
_MARK = "hone-mark-of-a-thought"


class AskedPrompt(Protocol):
    """The prompt of a request."""

    @property
    def opening(self) -> Hashable:
        """What requests must have in common to share nodes of a tree."""
        ...

    @property
    def whole(self) -> Sequence[Any]:
        """What requests are compared by."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Messages, as chat templates take them."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further variables of the template (`chat_template_kwargs`)."""
    images: tuple[OpenedImage, ...] = ()
    """The images of the messages, in the order of their parts, once they are open."""

    @property
    def columns(self) -> dict[str, Any]:
        """What the template gets with the messages."""
        tools = {TOOLS: [*self.tools]} if self.tools else {}
        return tools | ({ARGUMENTS: dict(self.arguments)} if self.arguments else {})

    @property
    def opening(self) -> Hashable:
        return "chat", _canonical(self.columns)

    @property
    def whole(self) -> tuple[bytes, ...]:
        return tuple(map(message_key, self.messages))


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text, without a template."""

    text: str

    @property
    def opening(self) -> Hashable:
        return "text"

    @property
    def whole(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, which the client has made."""

    token_ids: tuple[int, ...]

    @property
    def opening(self) -> Hashable:
        return "tokens"

    @property
    def whole(self) -> tuple[int, ...]:
        return self.token_ids


def message_key(message: Message) -> bytes:
    """What two messages must have in common to be the same one.

    Clients send back what they got with absent keys for nulls, arguments of calls written anew, and
    other ids of calls; some strip blanks around an answer. A part that is an image has the hash of
    its bytes.
    """
    content = message.get("content") or ""
    if message["role"] == "assistant" and isinstance(content, str):
        content = content.strip()
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    parts = (message["role"], content, calls, message.get("tool_call_id"), message.get("name"))
    return _canonical(parts)


def _canonical(value: object) -> bytes:
    """JSON that is equal for equal values. Raises Refusal for one that is nested too deeply."""
    try:  # unlike orjson, for integers of any size and halves of surrogate pairs too
        return json.dumps(value, sort_keys=True).encode()
    except RecursionError:
        raise Refusal(400, "the request has values that are nested too deeply") from None


class Prompts:
    """Makes token ids of the prompts of requests. Its methods take milliseconds and more for long
    prompts, so the server calls them in a thread of their own."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        *,
        vocab_size: int,
        max_model_len: int,
        end_ids: Collection[int],
        images: ImageReader | None = None,
    ) -> None:
        """`vocab_size` is the model's; `max_model_len` the longest sequence, in tokens; `end_ids`
        end one of its turns. `images` is the reader of its images; None: it reads text alone."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self.max_model_len = max_model_len
        self._images = images
        self._first = Renderer(tokenizer, data, keeps_messages=True, images=images)
        self._next = TurnRenderer(
            tokenizer,
            data,
            vocab_size=vocab_size,
            end_ids=end_ids,
            tool_format=format_in(str(tokenizer.chat_template or "")),
            images=images,
        )

    def behind(self, place: Place, prompt: AskedPrompt) -> Node:
        """The node of what `prompt` adds behind `place.turn`. Raises RenderError where that cannot
        be appended to what was sampled, Refusal where the prompt is wrong in itself."""
        if place.given is not None:
            return place.given
        if place.turn is None:
            return self.first(prompt)
        rest = prompt.whole[place.num_known :]
        if isinstance(prompt, TokenPrompt):
            return self._of_client(tuple(rest))
        nodes = path_of(place.turn)
        images = list[RowImage]()
        if isinstance(prompt, TextPrompt):
            self._refuse_marks(rest, "prompt")
            sample, observation = sample_of(nodes), Observation(rest, role=None)
        else:
            assert isinstance(prompt, ChatPrompt)
            new = with_names(prompt.messages, place.num_known)
            self._refuse_marks(new, "messages")
            sample, observation = sample_of(nodes), Observation(new)
            self._require_thoughts(nodes, new, prompt)
            known = prompt.messages[: place.num_known]
            num_known = sum(part["type"] == "image" for part in parts_in(known))
            images += (image.row for image in prompt.images[num_known:])
        said = self._next(sample, observation, images)
        return self._node(
            rest,
            token_ids=said.token_ids,
            text=said.text,
            messages=said.messages,
            model_input=said.model_input,
        )

    def first(self, prompt: AskedPrompt) -> Node:
        """The node of a whole prompt, rendered from the start. Raises Refusal."""
        if isinstance(prompt, TokenPrompt):
            return self._of_client(prompt.token_ids)
        if isinstance(prompt, TextPrompt):
            self._refuse_marks(prompt.text, "prompt")
            ids = self._encode(prompt.text)
            return self._node(prompt.whole, token_ids=ids, text=prompt.text, field="prompt")
        assert isinstance(prompt, ChatPrompt)
        self._refuse_marks(prompt.messages, "messages")
        if not self._first.uses_chat:
            raise Refusal(
                400,
                "the model's tokenizer has no chat template; send a text to /v1/completions, or "
                "start the server with one in model.chat_template",
                field="messages",
            )
        return self._rendered(prompt)

    def require_room(self, num_tokens: int, field: str) -> int:
        """Tokens that are left for an answer behind a prompt. Raises Refusal where none is."""
        if num_tokens >= self.max_model_len:
            raise Refusal(
                400,
                f"the prompt has {num_tokens} tokens, and the model's longest sequence, prompt and "
                f"answer, has {self.max_model_len}",
                field=field,
                code="context_length_exceeded",
            )
        return self.max_model_len - num_tokens

    def _require_thoughts(
        self, nodes: Sequence[Node], new: Sequence[Message], prompt: ChatPrompt
    ) -> None:
        """Raise RenderError where the template leaves thoughts out of earlier turns once `new`
        follows, as Qwen3's does when the user speaks again. The policy would go on from a history
        that it never sees where it is used."""
        history, num_thoughts = list[Message](), 0
        for node in nodes:
            thought = _END_OF_THOUGHT.search(node.text) if node.sampled is not None else None
            if thought is None:
                history += node.messages
                continue
            num_thoughts += 1
            content = f"<{thought[1]}>\n{_MARK}\n</{thought[1]}>\n\n{_MARK}"
            history.append({"role": "assistant", "content": content})
        if not num_thoughts:
            return
        arguments = template_arguments(self._tokenizer, prompt.columns, "the request")
        try:
            text = self._tokenizer.apply_chat_template(
                [*history, *new], tokenize=False, add_generation_prompt=True, **arguments
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RenderError(f"the chat template does not accept the messages: {error}") from error
        if cast(str, text).count(_MARK) < 2 * num_thoughts:
            raise RenderError("the chat template leaves out earlier thoughts once others follow")

    def _rendered(self, prompt: ChatPrompt) -> Node:
        example = Example(
            id="",
            location="messages",
            prompt=[*prompt.messages],
            answer=None,
            completion=None,
            task="",
            metadata={},
            columns=prompt.columns,
            raw_answer=None,
            images=tuple(image.row for image in prompt.images),
        )
        try:
            (found,) = self._first.prompts([example], max_tokens=self.max_model_len)
        except UserError as error:
            raise Refusal(400, f"{error}", field="messages") from error
        if found.is_cut:
            self.require_room(len(found.token_ids), "messages")
        return self._node(
            prompt.whole,
            token_ids=found.token_ids,
            text=found.text,
            messages=found.messages,
            model_input=found.model_input,
            columns=prompt.columns,
            field="messages",
        )

    def _refuse_marks(self, said: str | Sequence[Message], field: str) -> None:
        """Raise Refusal where a text spells a token that stands for an image, which a model would
        take for one."""
        if self._images is None:
            return
        for part in parts_in(said):
            if (mark := self._images.own_mark(part.get("text", ""))) is not None:
                raise Refusal(
                    400,
                    f"a text has {mark!r}, which stands for an image with this model; leave it "
                    "out, and send an image as a part of a message to /v1/chat/completions, "
                    "/v1/responses or /v1/messages",
                    field=field,
                )

    def _of_client(self, token_ids: tuple[int, ...]) -> Node:
        """The node of ids that a client has made. Raises Refusal where one of them stands for a
        part of an image: which one, ids do not say."""
        settings = None if self._images is None else self._images.settings
        if settings is not None and settings.placeholder_id in token_ids:
            raise Refusal(
                400,
                f"the ids have {settings.placeholder!r} ({settings.placeholder_id}), which stands "
                "for a part of an image, and this route takes no images; send messages with the "
                "image to /v1/chat/completions, /v1/responses or /v1/messages",
                field="token_ids",
            )
        return self._node(token_ids, token_ids=token_ids)

    def _encode(self, text: str) -> tuple[int, ...]:
        """The ids of a text, after the begin-of-text token where the tokenizer adds one."""
        try:
            found: Any = self._tokenizer(text, verbose=False)
        except Exception as error:
            if not is_of_tokenizers(error):
                raise
            raise Refusal(
                400, f"the tokenizer cannot encode the prompt: {error}", field="prompt"
            ) from error
        return tuple(found["input_ids"])

    def _node(
        self,
        part: Sequence[Any],
        *,
        token_ids: tuple[int, ...],
        text: str = "",
        messages: tuple[Message, ...] = (),
        model_input: ModelInput = TEXT,
        columns: Mapping[str, Any] | None = None,
        field: str = "token_ids",
    ) -> Node:
        unknown = unknown_token(
            token_ids, self._vocab_size, self._tokenizer.convert_ids_to_tokens
        ) or next((f"the id {token}" for token in token_ids if token < 0), None)
        if unknown or not token_ids:
            problem = f"it has {unknown}, and the model has {self._vocab_size} tokens"
            raise Refusal(
                400, problem if unknown else "the prompt renders to no tokens at all", field=field
            )
        return Node(
            part=part,
            token_ids=token_ids,
            text=text,
            messages=messages,
            model_input=model_input,
            columns=columns or {},
        )
