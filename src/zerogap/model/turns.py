"""The turns of a chat as token ids: what comes between two turns of the policy, and where a template forgets.

The ids that the policy sampled are never made from text again. A turn is continued by *bridge* ids: what the chat
template puts between the end of an answer and the next generation prompt, tokenised by itself. A template that rewrites
earlier turns (drops their thinking) has no bridge; then the next turn begins a new segment, rendered anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from zerogap.model.checkpoint import CheckpointError
from zerogap.trajectory import Message

# Stands for the answer; what follows it in a rendered chat follows the answer.
_ANSWER = "zerogap:answer:5d0f"
_THINKING = f"<think>\n{_ANSWER}:thought\n</think>\n\n"


class CannotRender(ValueError):
    """The chat template has no place for these messages; the message says what it refused."""


Supervised = tuple[list[int], list[int]]  # token ids, loss mask


@dataclass(frozen=True)
class NextTurn:
    """How a chat goes on. appended: ids follow the sampled ones; else they are the prompt of a new segment.
    chat: the messages that the policy has read by then."""

    ids: list[int]
    appended: bool
    chat: list[Message]


class ChatTurns:
    """Renders one tokenizer's chats. tools: JSON schemas that the chat template shows to the policy, if any."""

    def __init__(self, tokenizer: Any, tools: Sequence[dict[str, Any]] = ()) -> None:
        self._tokenizer = tokenizer
        self._tools = list(tools)
        self._append_only: dict[str, bool] = {}
        added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
        added |= dict.fromkeys(tokenizer.all_special_tokens, True)
        self._added = sorted(added.items(), key=lambda item: -len(item[0]))  # a token may be part of a longer one

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the messages and the generation prompt: the opening of an episode, or of a new segment."""
        return self._encode(self._render(messages))

    def text(self, sampled: Sequence[int]) -> str:
        """What the policy said in a turn: the sampled ids as text, without special tokens."""
        text: str = self._tokenizer.decode(list(sampled), skip_special_tokens=True)
        return text

    def next_turn(self, chat: Sequence[Message], sampled: Sequence[int], observation: Sequence[Message]) -> NextTurn:
        """What the policy reads between the turn whose ids it sampled, after `chat`, and its next one.

        Raises CannotRender where the chat template has no place for the observation.
        """
        answer = self._plain({"role": "assistant", "content": self.text(sampled)})
        seen = [self._plain(message) for message in observation]
        appended = all(self.append_only(message["role"]) for message in seen)
        after = [*chat, answer, *seen]
        return NextTurn(self._bridge(chat, sampled, seen) if appended else self.prompt(after), appended, after)

    def _bridge(self, messages: Sequence[Message], sampled: Sequence[int], seen: Sequence[Message]) -> list[int]:
        """Ids to append. An end mark that the policy sampled itself is not repeated; where it sampled none (a stop
        string ended the turn), the template's own end mark comes first."""
        answer = _ANSWER
        while any(answer in message["content"] for message in (*messages, *seen)):
            answer += ":"
        chat = [*messages, {"role": "assistant", "content": answer}, *seen]
        after = _behind(answer, self._render(chat))
        if sampled[-1] in self._tokenizer.all_special_ids:
            after = after.removeprefix(self._tokenizer.decode([sampled[-1]], skip_special_tokens=False))
        ids = self._encode(after)
        if not ids:
            raise CannotRender("the observation gives the policy nothing to read before its next turn")
        return ids

    def solution(self, messages: Sequence[Message], turns: str | Sequence[Message]) -> list[Supervised]:
        """(token ids, loss mask) of a worked episode, laid out as a rollout of it: the mask is 1 on what the policy
        says. One pair; where the template forgets, one for each segment.

        turns: from the policy's first answer to its last, with what it is shown in between; a text is one answer.
        Raises CheckpointError where the tokenizer has no end mark.
        """
        if (end := self._tokenizer.eos_token_id) is None:
            raise CheckpointError("the tokenizer has no eos_token; a supervised example must teach where to stop")
        if isinstance(turns, str):
            turns = [{"role": "assistant", "content": turns}]
        chat, ids = list(messages), self.prompt(messages)
        mask, segments = [0] * len(ids), []
        for answer, shown in _answers(turns):
            said = [*self._encode(answer["content"]), end]
            ids, mask = ids + said, mask + [1] * len(said)
            if shown:
                following = self.next_turn(chat, said, shown)
                if not following.appended:
                    segments.append((ids, mask))
                    ids, mask = [], []
                ids, mask, chat = ids + following.ids, mask + [0] * len(following.ids), following.chat
        return [*segments, (ids, mask)]

    def _plain(self, message: Message) -> Message:
        """The message without control tokens in its text: a tool that spells one could end its turn and go on as the
        assistant. Of an answer the added tokens that are not special stay, as <tool_call> and <think> may be."""
        content = message["content"]
        for token, special in self._added:
            if special or message["role"] != "assistant":
                content = content.replace(token, f"{token[:1]} {token[1:]}")
        return {**message, "content": content}

    def append_only(self, role: str) -> bool:
        """Whether earlier turns, thinking included, stay as they were said once a message of this role follows. Raises
        CannotRender where the chat template has no place for such a message, or for what the policy said."""
        if role not in self._append_only:
            question: Message = {"role": "user", "content": "question"}
            said: Message = {"role": "assistant", "content": _THINKING + _ANSWER}
            text = self._render([question, said, {"role": role, "content": "seen"}])
            _behind(_ANSWER, text)
            opening = self._render([question])
            # A generation prompt may already open the thinking; then the policy's own text begins behind it.
            whole = opening + said["content"], opening + said["content"].removeprefix("<think>\n")
            self._append_only[role] = text.startswith(whole)
        return self._append_only[role]

    def _render(self, messages: Sequence[Message]) -> str:
        """With the generation prompt; without a chat template, the contents one after another."""
        if not self._tokenizer.chat_template:
            return "".join(message["content"] for message in messages)
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tools=self._tools or None, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:  # a template may refuse a role, or an order of roles
            roles = ", ".join(message["role"] for message in messages)
            raise CannotRender(f"the chat template refuses messages of the roles {roles}: {error}") from error
        return text

    def _encode(self, text: str) -> list[int]:
        # verbose=False: what is longer than the context is the caller's to count, not transformers' to warn of.
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids


def _behind(answer: str, text: str) -> str:
    _, found, after = text.rpartition(answer)
    if not found:
        raise CannotRender("the chat template leaves the assistant's turn out, so there is nothing to continue")
    return after


def _answers(turns: Sequence[Message]) -> list[tuple[Message, list[Message]]]:
    """Each answer of the policy with what it is shown afterwards."""
    answers: list[tuple[Message, list[Message]]] = []
    for message in turns:
        if message["role"] == "assistant":
            answers.append((message, []))
        else:
            answers[-1][1].append(message)
    return answers
