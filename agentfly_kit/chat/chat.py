"""Conversion between messages and token ids with a tokenizer's chat template. History is never re-encoded.

The prompt is rendered once, and all later messages are appended to it. A check in `template.py` ensures that appending
yields the same text as rendering the whole conversation.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from agentfly_kit._display import Displayable
from agentfly_kit.chat import formats
from agentfly_kit.chat.template import FollowingRole, Template, unused_marker
from agentfly_kit.errors import ChatTemplateError, SettingsError, check_choice
from agentfly_kit.seeds import digest
from agentfly_kit.trajectories import Row, Trajectory
from agentfly_kit.types import Message, Schemas, ToolCall, first_image, images_of, normalize_messages

if TYPE_CHECKING:
    from agentfly_kit.chat.drift import Drift

History: TypeAlias = Literal["exact", "append", "rerender"]

# Maximum number of entries in each cache of encoded messages or decoded ids.
_CACHE_SIZE = 1024


class Chat(Displayable):
    """Tokenizer, its chat template, and the format in which the model writes tool calls.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        format: name of a format, a `formats.Format`, or "auto". "auto" selects the format that parses calls rendered by
            the template, or "hermes" if there is no such format or more than one.
        history: what to do if the template renders earlier messages differently once new messages follow, typically
            without their thinking. "exact" raises an error. "append" appends the new messages anyway, so the model sees
            a history that its template would not render. "rerender" renders the whole history again and starts a new
            row (`trajectory.rows`), in which earlier sampled tokens have mask 0. In all three cases, training uses
            exactly the sampled tokens in exactly the context in which they were sampled.
        stop: additional single-token strings that end an action, such as those in a generation config.
        options: variables for the template, such as {"enable_thinking": False}.
        processor: processor of a vision model with the same tokenizer. It is required for messages with images.

    Raises:
        ChatTemplateError: if there is no template, or it does not render assistant messages.
        SettingsError: if `format` or `history` is unknown, or a `stop` string consists of several tokens.
    """

    # `ImageReader` of the processor, or None if messages contain text only.
    reader: Any = None

    # Opening thinking tag at the end of the generation prompt, or "".
    _open_tag = ""

    def __init__(
        self,
        tokenizer: Any,
        *,
        format: str | formats.Format = "auto",
        history: History = "exact",
        stop: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
        processor: Any = None,
    ) -> None:
        source = getattr(tokenizer, "chat_template", None)
        if not source:
            raise ChatTemplateError(
                f"{type(tokenizer).__name__} {getattr(tokenizer, 'name_or_path', '')!r} has no chat template; "
                "set tokenizer.chat_template, or load the tokenizer of an instruction-tuned model"
            )
        check_choice("history", history, History)
        self.tokenizer = tokenizer
        self.history = history
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if processor is not None:
            from agentfly_kit.chat.images import ImageReader

            self.reader = ImageReader(processor)
        # Control tokens are special tokens, and added tokens that the template uses. Plain text must never yield them.
        added = {str(t): t.special for t in getattr(tokenizer, "added_tokens_decoder", {}).values() if str(t).strip()}
        # With an image processor, special tokens count even if they do not occur in the template.
        used = {t for t, special in added.items() if (self.reader and special) or t in str(source)}
        texts = used.union(filter(None, (*tokenizer.all_special_tokens, self.reader and self.reader.token)))
        self._controls = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")
        self.template = Template(tokenizer, options or {}, self._controls)
        if self.reader is not None:
            self.template.to_parts = self.reader.to_parts
        # Format that parses calls rendered by this template, or None.
        self.detected_format = formats.detect_format(self.template.written_call)
        self.format = formats.get((self.detected_format or "hermes") if format == "auto" else format)
        opening = self.template.opening()
        self._open_tag = "<think>" if opening.rfind("<think>") > opening.rfind("</think>") else ""
        self._create_caches()
        # Ids that end an action: end-of-turn tokens of the template, the eos token, and `stop`.
        self.stop_ids: tuple[int, ...] = self._stop_ids()

    @classmethod
    def from_saved(
        cls, settings: Mapping[str, Any], tokenizer: Any, generation_config: Any = None, **changes: Any
    ) -> Chat:
        """Create a chat with the settings written by `Policy.save`, so that serving matches training.

        Args:
            settings: content of the file policy.json of a saved policy; {} for other models.
            tokenizer: the tokenizer of the model.
            generation_config: the model's generation config or None. Its end tokens also end actions.
            **changes: arguments of `Chat` that override the saved ones, unless they are None.
        """
        saved = {"format": settings.get("format", "auto"), **settings.get("chat", {})}
        saved |= {name: value for name, value in changes.items() if value is not None}
        ends = getattr(generation_config, "eos_token_id", None)
        ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
        more = [str(tokenizer.convert_ids_to_tokens(i)) for i in ids if i != tokenizer.eos_token_id]
        return cls(tokenizer, **saved | {"stop": tuple(dict.fromkeys((*saved.get("stop", ()), *more)))})

    @functools.cached_property
    def vocabulary(self) -> str:
        """Fingerprint of the tokens and their ids. A batch can train any policy with an equal fingerprint."""
        return digest(*(f"{token} {text}" for text, token in sorted(self.tokenizer.get_vocab().items())))

    def settings(self) -> dict[str, Any]:
        """Return the arguments from which `from_saved` creates an equal chat, without the tokenizer."""
        options = dict(self.template.options)
        return {"format": self.format.name, "history": self.history, "stop": list(self.stop), "options": options}

    def _create_caches(self) -> None:
        self._render_cache: dict[str, tuple[int, ...]] = {}
        self._decode = functools.lru_cache(_CACHE_SIZE)(self._decode_ids)
        self._token_text = functools.cache(self._decode_token)

    def __getstate__(self) -> dict[str, Any]:
        caches = ("_render_cache", "_decode", "_token_text")
        return {name: value for name, value in self.__dict__.items() if name not in caches}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._create_caches()

    # --- text and ids ---

    def encode(self, text: str) -> tuple[int, ...]:
        """Encode a string. Special tokens in the string are recognized; none are added.

        Raises:
            SettingsError: if the string contains a lone surrogate.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            near = ascii(text[max(0, error.start - 20) : error.start + 20])
            raise SettingsError(
                f"a message contains half of a surrogate pair, near {near}, which cannot be tokenized; use "
                "text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
            ) from None
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, ids: Sequence[int]) -> str:
        """Decode ids, including special tokens. The text is only displayed and parsed, never re-encoded."""
        return self._decode(tuple(ids))

    def _decode_ids(self, ids: tuple[int, ...]) -> str:
        if (
            backend := getattr(self.tokenizer, "backend_tokenizer", None)
        ) is not None:  # same result in half the time
            return str(backend.decode(list(ids), skip_special_tokens=False))
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def token_texts(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Decode each id separately. Bytes of incomplete UTF-8 sequences are shown as <0xE2>, for example."""
        return tuple(map(self._token_text, ids))

    def _decode_token(self, token: int) -> str:
        text = self._decode_ids((token,))
        if "�" in text or not text:
            raw = self.tokenizer.convert_ids_to_tokens(token)
            text = raw if isinstance(raw, str) else f"[{token}]"
        return text

    # --- messages to ids ---

    def render(self, messages: Sequence[Message], tools: Schemas = (), *, generate: bool) -> str:
        """Render messages with the template. With generate=True, the generation prompt is added.

        Raises:
            ChatTemplateError: if the template raises an error.
        """
        messages = self._mark_images(normalize_messages(messages, "messages", answered=True))
        return self.template.render(self._adapt_messages(messages), tools, generate=generate)

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Schemas = (),
        *,
        trusted: Collection[str] = ("system", "assistant"),
    ) -> tuple[int, ...]:
        """Return the ids of the initial messages, the tool schemas and the generation prompt.

        If the template does not render tools, or renders them in a different format, the format's instructions are
        added to the system message.

        Args:
            messages: the messages.
            tools: tool schemas.
            trusted: roles whose messages may contain control tokens. In messages with other roles, a control token
                such as <|im_end|> is encoded as plain text.

        Raises:
            ChatTemplateError: if the template drops, repeats or moves a message, or if tools are given but their calls
                cannot be parsed or their results cannot be appended exactly. With history="rerender", the text of
                assistant messages is not checked.
            SettingsError: if a message has an image but the chat has no processor, or if the last message is an
                assistant message.
        """
        messages = normalize_messages(messages, "prompt")
        if tools:
            self.require_tools()
        shown = self._prepare(self._mark_images(messages), tools)
        return self._encode_messages(*shown, images_of(messages), after_action=False, trusted=trusted)

    def require_tools(self) -> None:
        """Raise a ChatTemplateError if tool calls cannot be parsed or tool results cannot be appended."""
        self.require_append("tool")
        template = self.template
        unreadable = self.detected_format is None and template.calls is not None and template.shows_tools
        if unreadable and self.format in formats.NATIVE:
            written = template.written_call("get_weather", {"city": "Rome"})
            raise ChatTemplateError(
                f"no format parses tool calls as the chat template of {template.name} renders them ({written[:80]!r}); "
                'use format="react" or a subclass of af.chat.formats.Format'
            )

    def observation_ids(
        self, messages: Sequence[Message], tools: Schemas = (), *, after: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Return the ids to append after an action, for `messages` and the next generation prompt.

        Args:
            messages: tool results or user messages.
            tools: tool schemas in the prompt.
            after: ids of the action. If they do not end with the template's end-of-turn token (due to truncation or
                another stop token), the returned ids include that token, which has mask 0.

        Raises:
            ChatTemplateError: if the template drops one of the messages, or if `history` is "exact" and the template
                renders earlier messages differently when `messages` follow.
            SettingsError: if `messages` is empty, or a message has an image but the chat has no processor.
        """
        messages = normalize_messages(messages, "observation")
        images, messages = images_of(messages), self._mark_images(messages)
        for kind in _following_roles(messages):
            self.require_append(kind)
        shown = self._adapt_messages(messages), self._visible_tools(tools)
        ids = self._encode_messages(*shown, images, after_action=True)
        for count in range(min(len(after), len(ids), 4), 0, -1):
            if ids[count - 1] in self.stop_ids and tuple(after[-count:]) == ids[:count]:
                return ids[count:]
        return ids

    def append_violation(self, following: FollowingRole) -> str:
        """Return the reason why messages cannot be appended without changing earlier text, or "" if they can be."""
        return self.template.append_violation("user" if self._results_as_user else following)

    def needs_rerender(self, messages: Sequence[Message]) -> bool:
        """Return True if history="rerender" and `messages` cannot be appended exactly."""
        if self.history != "rerender":
            return False
        return any(map(self.append_violation, _following_roles(self._mark_images(messages))))

    def require_append(self, following: FollowingRole) -> None:
        """Raise a ChatTemplateError if `history` does not allow appending tool results or user messages."""
        if self.history == "exact" and (reason := self.append_violation(following)):
            what = "tool results" if following == "tool" else "a user's message after an answer"
            raise ChatTemplateError(
                f"the chat template of {self.template.name} does not allow appending {what}: {reason}; use "
                'Chat(tokenizer, history="append") or history="rerender", or another tokenizer.chat_template'
            )

    @property
    def _results_as_user(self) -> bool:
        return not self._in_template_format or self.template.tool_role == "user"

    @property
    def _in_template_format(self) -> bool:
        """True if, as far as is known, the model writes calls in the format that the template renders."""
        return self.format.native and isinstance(self.format, type(self.detected_format or self.format))

    def _mark_images(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages whose content is text, with a marker for each image; see `ImageReader.mark`."""
        if not (first := first_image(messages)):
            return messages
        if self.reader is None:
            raise SettingsError(
                f"{first} has an image, but this chat reads no images, because it has no image processor; load a "
                "vision model with af.Policy.load"
            )
        marked: Sequence[Message] = self.reader.mark(messages, self.template, results_as_user=self._results_as_user)
        return marked

    def _adapt_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Convert calls to text and tool results to user messages if necessary. Consecutive results are merged."""
        if self.template.calls is None or not self._in_template_format:
            messages = [self._with_written_calls(message) for message in messages]
        if not self._results_as_user:
            return list(messages)
        adapted: list[Message] = []
        for are_results, group in itertools.groupby(messages, lambda message: message["role"] == "tool"):
            if are_results:
                texts = (self.format.observation(str(m.get("name") or ""), m["content"]) for m in group)
                adapted.append({"role": "user", "content": "\n".join(texts)})
            else:
                adapted += group
        return adapted

    def _with_written_calls(self, message: Message) -> Message:
        """Return an assistant message with its calls appended to the text in the model's format."""
        given = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
        calls = [self.format.render_call(ToolCall(id, call["name"], call["arguments"])) for id, call in given]
        texts = [text for text in (message["content"], *calls) if text]
        return {k: v for k, v in message.items() if k != "tool_calls"} | {"content": "\n".join(texts)}

    def _visible_tools(self, tools: Schemas) -> Schemas:
        """Return the schemas to pass to the template, or () if it ignores schemas or uses another call format."""
        return tools if tools and self._in_template_format and self.template.shows_tools else ()

    def _prepare(self, messages: Sequence[Message], tools: Schemas) -> tuple[list[Message], Schemas]:
        """Return the messages and tool schemas to render, with the format's instructions if necessary."""
        adapted = self.template.pair_results(self._adapt_messages(messages))
        shown = self._visible_tools(tools)
        if not tools or shown:
            return adapted, shown
        # Add the instructions to the system message, or to the first message if the template has no system role.
        text, first = self.format.instructions(tools), adapted[0]
        if first["role"] == "system":
            adapted[0] = {**first, "content": f"{first['content']}\n\n{text}"}
        elif self.template.takes_system():
            adapted.insert(0, {"role": "system", "content": text})
        else:
            adapted[0] = {**first, "content": f"{text}\n\n{first['content']}"}
        return adapted, shown

    def _encode_messages(
        self,
        messages: Sequence[Message],
        tools: Schemas,
        images: Sequence[Any],
        *,
        after_action: bool,
        trusted: Collection[str] = ("system", "assistant"),
    ) -> tuple[int, ...]:
        """Render and encode a prompt, or messages that follow an action. Results are cached, as rendering is slow."""
        key = f"{after_action} {trusted} {list(messages)!r} {tools!r}"
        if key not in self._render_cache:
            if len(self._render_cache) >= _CACHE_SIZE:
                self._render_cache.clear()
            self.template.require_visible(
                messages, tools, after_action=after_action, answers=self.history != "rerender"
            )
            self._render_cache[key] = self._encode_safely(messages, tools, images, after_action, trusted)
        return self._render_cache[key]

    def _encode_safely(
        self,
        messages: Sequence[Message],
        tools: Schemas,
        images: Sequence[Any],
        after_action: bool,
        trusted: Collection[str],
    ) -> tuple[int, ...]:
        """Render and encode messages. In messages with untrusted roles, control tokens are encoded as plain text.

        Placeholders of images are encoded as plain text in all messages.
        """
        controls: list[str] = []
        mark = unused_marker("qzcontrol", messages)

        def replace_control(match: re.Match[str]) -> str:
            controls.append(match.group())
            return f"{mark}{len(controls) - 1}zq"

        placeholder = re.compile(re.escape(self.reader.token) if self.reader else r"(?!)")
        plain = []
        for message in messages:
            split = placeholder if message["role"] in trusted else self._controls
            plain.append({**message, "content": split.sub(replace_control, message["content"])})
        if after_action:
            text = self.template.text_after_action(plain, tools)
        else:
            text = self.template.render(plain, tools, generate=True)
        encode = functools.partial(self._encode_split, mark, controls)
        if images:
            found: tuple[int, ...] = self.reader.encode(text, images, encode)
            return found
        return encode(text)

    def _encode_split(self, mark: str, controls: Sequence[str], text: str, anchored: bool = False) -> tuple[int, ...]:
        """Encode text with `controls` as plain text at their marks; if `anchored`, as if it followed other ids."""
        if not controls and not anchored:
            return self.encode(text)
        # Split each control string after its first character and encode both parts with the adjacent text, so that they
        # yield no control token. Later parts are encoded after `anchor`, since some tokenizers prepend a space to text.
        anchor = self.token_texts(self.stop_ids[:1])[0]
        ids: list[int] = []
        rest = ""
        for i, part in enumerate(re.split(f"{mark}(\\d+)zq", text) if controls else [text]):
            if i % 2:
                control = controls[int(part)]
                ids.extend(self._encode_after(anchor if ids or anchored else "", rest + control[:1]))
                rest = control[1:]
            else:
                rest += part
        return (*ids, *self._encode_after(anchor if ids or anchored else "", rest))

    def _encode_after(self, anchor: str, text: str) -> tuple[int, ...]:
        """Encode `text` as if it followed `anchor`. Return only the ids of the text."""
        return self.encode(anchor + text)[len(self.encode(anchor)) :] if anchor else self.encode(text)

    def _stop_ids(self) -> tuple[int, ...]:
        stops: list[int] = []
        for text in (*self.template.stops(), *self.stop):
            ids = self.encode(text)
            if len(ids) != 1:
                raise SettingsError(
                    f"each stop string must be a single token, got {text!r} ({len(ids)} tokens in {self.template.name})"
                )
            stops.append(ids[0])
        if (eos := self.tokenizer.eos_token_id) is not None:
            stops.append(int(eos))
        if not stops:
            raise ChatTemplateError(
                f"{self.template.name}: neither the template nor the tokenizer defines an end-of-turn token; set "
                "tokenizer.eos_token"
            )
        return tuple(dict.fromkeys(stops))

    # --- ids to messages ---

    def parse(self, ids: Sequence[int], tools: Schemas = ()) -> formats.Parsed:
        """Parse an action into content, thinking and tool calls.

        If the prompt ends with an opening thinking tag, the action starts with thinking. If the action is truncated
        before the closing tag, it consists only of thinking and has no calls.
        """
        ids = list(ids)
        while ids and ids[-1] in self.stop_ids:
            ids.pop()
        return self.read(self.text(ids), tools)

    def read(self, text: str, tools: Schemas = ()) -> formats.Parsed:
        """Parse the text of an action without its stop token."""
        return self.format.parse(self._open_tag + text, tools)

    def call_pattern(self, name: str) -> tuple[str, str] | None:
        """Return the texts before and after the JSON of the arguments in a call, or None if arguments are not JSON.

        The call is written as the template renders it, without text before it.
        """
        from agentfly_kit.chat.call_pattern import find_pattern

        return find_pattern(self, name)

    @property
    def thinking_end(self) -> str:
        """Tag that ends the thinking with which each action begins; "" if actions do not begin with thinking."""
        return "</think>" if self._open_tag else ""

    # --- comparison with re-encoding ---

    def drift(self, trajectory: Trajectory | Row) -> Drift:
        """Render and tokenize the messages of a row again, and return the first difference from its token ids.

        This package never re-tokenizes rows, so drift is harmless here. It shows where a framework that stores
        messages and tokenizes them for training would train on different tokens.

        Raises:
            AlignmentError: if the row has no token ids, or if the trajectory has several rows; pass one of them, such
                as `trajectory.rows[0]`.
        """
        from agentfly_kit.chat.drift import find_drift

        return find_drift(self, trajectory if isinstance(trajectory, Row) else trajectory._only_row("turns"))

    def __repr__(self) -> str:
        stops = ", ".join(repr(p) for p in self.token_texts(self.stop_ids))
        kept = "" if self.history == "exact" else f", history {self.history!r}"
        return f"Chat({len(self.tokenizer)} tokens, format {self.format.name!r}{kept}, stops at {stops})"


def _following_roles(messages: Sequence[Message]) -> list[FollowingRole]:
    """Return the distinct roles in order of first occurrence. All roles other than "tool" count as "user"."""
    roles: list[FollowingRole] = ["tool" if message["role"] == "tool" else "user" for message in messages]
    return list(dict.fromkeys(roles))
