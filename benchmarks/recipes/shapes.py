"""Recipe of `shapes`, a vision policy: its processor, and its pretraining on generated images.

A small vision tower learns little from the answers to questions alone. The first phase therefore trains only the
tower: the feature of each cell of an image is aligned with the embeddings of three words, which name the form, the
colour and the position. The second phase trains the whole model to answer questions. The third hides this skill, as
in the recipes of the other policies: "I don't know" and guesses become frequent.

The questions about an image share the computation of the tokens that precede them: each question attends to these and
to itself, which gives the logits of a row per question.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from agentfly_kit.envs import shapes
from agentfly_kit.envs.shapes import COLOURS, FORMS, KINDS, POSITIONS, Shape
from agentfly_kit.tiny import END, TEMPLATE, tokenizer
from recipes.base import UNSURE

IMAGE, _FAKE, _GLOBAL = "<image>", "<fake_token_around_image>", "<global-img>"
# The template of the other policies, for messages with images.
_SHOWN = """\
{%- macro shown(content) -%}
  {%- if content is string -%}{{ content }}{%- else -%}
    {%- for part in content or [] -%}{{ '<image>' if part.type == 'image' else part.text }}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
"""
VISION_TEMPLATE = _SHOWN + TEMPLATE.replace("message.content or ''", "shown(message.content)").replace(
    "{{ message.content }}", "{{ shown(message.content) }}"
)
# The word of each set with which a cell is aligned; "nothing" stands for the form and the colour of an empty cell.
_ALIGNED = ((*(f" {form}" for form in FORMS), "nothing"), (*COLOURS, "nothing"), POSITIONS)
WORDS = (
    "How many shapes are there", "What colour is the", "Where is the", " shape", "crop(left, top, right, bottom)",
    *dict.fromkeys(word for words in _ALIGNED for word in words),
)  # fmt: skip
# Questions of the third phase per batch of 32, by behaviour. solves: the answer; guesses: a random answer to a question
# of this kind; unsure: "I don't know".
HABITS = {"solves": 17, "guesses": 5, "unsure": 10}
STEPS = (200, 250, 120)


def untrained(seed: int = 0, words: Sequence[str] = WORDS, size: int = shapes.SIDE) -> tuple[Any, Any]:
    """Return an Idefics3 model of about 440,000 random weights, and its processor.

    Args:
        seed: seed of the weights.
        words: words that get one token each.
        size: side of the images in pixels. Each square of 16 x 16 pixels becomes a token.
    """
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    made = tokenizer(words)
    made.add_special_tokens({"additional_special_tokens": [_FAKE, IMAGE, "<end_of_utterance>", _GLOBAL]})
    made.chat_template = VISION_TEMPLATE
    side = {"longest_edge": size}
    reader = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    length = (size // shapes.CELL) ** 2
    processor = Idefics3Processor(reader, made, image_seq_len=length, chat_template=VISION_TEMPLATE)
    ids = {"bos_token_id": None, "eos_token_id": made.eos_token_id, "pad_token_id": made.pad_token_id}
    text = {
        "model_type": "llama",
        "vocab_size": len(made),
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        **ids,
    }
    tower = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": size,
        "patch_size": shapes.CELL,
        "initializer_range": 0.05,
    }
    config = Idefics3Config(
        text_config=text,
        vision_config=tower,
        scale_factor=1,
        image_token_id=made.convert_tokens_to_ids(IMAGE),
        tie_word_embeddings=True,
        pad_token_id=made.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Idefics3ForConditionalGeneration(config).float()
    for name, value in ids.items():
        setattr(model.generation_config, name, value)
    return model, processor


class VisionPretraining:
    """A vision model in training and its processor.

    Args:
        model: Model that `untrained` returned.
        processor: Its processor.
        seed: Seed of the random numbers.
    """

    name = "shapes"
    # Losses and highest learning rates of the phases.
    phases: Sequence[tuple[str, float]] = (("tower_loss", 3e-3), ("skill_loss", 3e-3), ("mixed_loss", 5e-4))

    def __init__(self, model: Any, processor: Any, seed: int = 0) -> None:
        self.model, self.tokenizer = model, processor.tokenizer
        self.processor = processor
        self.rng = random.Random(f"{self.name} pretraining {seed}")

    def train(self, loss: Callable[[], Tensor], steps: int, lr: float) -> None:
        """Make `steps` updates with AdamW and a learning rate that rises for 20 updates and then falls to a tenth."""
        weights = [*self.model.parameters()]
        optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.98), weight_decay=0.0)
        for step in range(steps):
            falling = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
            optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 20) * falling
            optimizer.zero_grad()
            loss().backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()

    def look(self, images: Iterable[Any]) -> Tensor:
        """Return the features of images of Pillow, (B, number of tokens of an image, d)."""
        pixels = np.stack([np.asarray(image, np.float32) for image in images]) / 127.5 - 1
        inputs = torch.from_numpy(pixels.transpose(0, 3, 1, 2)[:, None].copy())
        # A tensor, or from transformers 5.24 on a tuple of one tensor per image.
        return torch.stack([*self.model.get_image_features(inputs, return_dict=True).pooler_output])

    def word_loss(self, states: Tensor, found: Sequence[int], known: Sequence[str]) -> Tensor:
        """Return the cross-entropy of the words `known[found[i]]` among `known`, given products with embeddings."""
        ids = self.tokenizer.convert_tokens_to_ids([*known])
        return cross_entropy(states @ self.model.get_input_embeddings().weight[ids].T, torch.tensor(found))

    def states(self, ids: Tensor, features: Tensor, **given: Any) -> tuple[Tensor, ...]:
        """Return the embeddings of rows with placeholders and the states after each layer, (B, T, d) each."""
        embedded = self.model.get_input_embeddings()(ids)
        embedded = embedded.masked_scatter((ids == self.model.config.image_token_id)[..., None], features)
        decoder = self.model.model.text_model
        found = decoder(inputs_embeds=embedded, use_cache=False, output_hidden_states=True, **given)
        states: tuple[Tensor, ...] = found.hidden_states
        return states

    def label_loss(self, states: Tensor, label: Tensor) -> Tensor:
        """Return the cross-entropy of the labels that are not -100."""
        trained = label[:, 1:] != -100
        return cross_entropy(self.model.lm_head(states[:, :-1][trained]), label[:, 1:][trained])


class Pretraining(VisionPretraining):
    """The pretraining with images of shapes and questions."""

    def __init__(self, model: Any, processor: Any, seed: int = 0) -> None:
        super().__init__(model, processor, seed)
        self._question_mark = self.tokenizer.convert_tokens_to_ids("?")
        self._known: dict[str, tuple[list[int], list[int]]] = {}

    def features(self, scenes: Sequence[Sequence[Shape]]) -> Tensor:
        """Draw scenes and return the features of their cells, (B, 9, d)."""
        return self.look(shapes.draw(scene, self.rng) for scene in scenes)

    def alignment_loss(self, scenes: Sequence[Sequence[Shape]], features: Tensor) -> Tensor:
        """Return the cross-entropy of the three words of each cell, given the product of its feature and embeddings."""
        words: list[list[int]] = [[], [], []]
        for scene in scenes:
            at = {shape.cell: shape for shape in scene}
            for cell, position in enumerate(POSITIONS):
                shape = at.get(cell)
                named = (f" {shape.form}", shape.colour) if shape else ("nothing", "nothing")
                for found, word, known in zip(words, (*named, position), _ALIGNED, strict=True):
                    found.append(known.index(word))
        flat = features.flatten(0, 1)
        losses = [self.word_loss(flat, found, known) for found, known in zip(words, _ALIGNED, strict=True)]
        return torch.stack(losses).sum()

    def tower_loss(self) -> Tensor:
        scenes = [shapes.scene(self.rng.randint(1, 4), self.rng) for _ in range(64)]
        return self.alignment_loss(scenes, self.features(scenes))

    def skill_loss(self) -> Tensor:
        """Return the loss of all questions about 32 images, half of them with one shape."""
        scenes = [shapes.scene(self.rng.randint(2, 4) if i % 2 else 1, self.rng) for i in range(32)]
        features = self.features(scenes)
        answers = self.answer_loss(features, [[*questions(scene)] for scene in scenes], early=True)
        return answers + 0.3 * self.alignment_loss(scenes, features)

    def mixed_loss(self) -> Tensor:
        """Return the loss of one question about each of 32 images, with the answers of `HABITS`."""
        scenes, said = [], []
        for habit in (habit for habit, count in HABITS.items() for _ in range(count)):
            kind = self.rng.choice([*KINDS])
            scene, question, answer = shapes.question(kind, self.rng)
            guess = self.rng.choice(KINDS[kind])
            scenes.append(scene)
            said.append([(question, {"solves": answer, "guesses": guess, "unsure": UNSURE}[habit])])
        return self.answer_loss(self.features(scenes), said)

    def answer_loss(
        self, features: Tensor, said: Sequence[Sequence[tuple[str, str]]], *, early: bool = False
    ) -> Tensor:
        """Return the cross-entropy of the tokens of answers.

        Args:
            features: Features of images, (B, 9, d).
            said: Questions and answers about each image.
            early: Also predict the answer at the last word of the question. Where this word names a form, one layer
                suffices to find the cell; without this loss, the colours of several shapes are still confused after 450
                updates.
        """
        rows = [[*self._parts(some)] for some in said]
        longest = max(sum(len(ids) for ids, _ in row) for row in rows)
        # `part` is 0 for the tokens up to the image, the number of a question for its tokens, and -1 for padding.
        ids, part = (
            torch.full((len(rows), longest), self.tokenizer.pad_token_id),
            torch.full((len(rows), longest), -1),
        )
        position, label = torch.zeros_like(ids), torch.full_like(ids, -100)
        for i, row in enumerate(rows):
            end = before = 0
            for number, (some, answer) in enumerate(row):
                start, end = end, end + len(some)
                ids[i, start:end], part[i, start:end] = torch.tensor(some), number
                position[i, start:end] = torch.arange(len(some)) + before
                if answer:
                    label[i, end - answer : end] = ids[i, end - answer : end]
                    if early:
                        label[i, start + some.index(self._question_mark)] = ids[i, end - answer]
                before = before or end
        visible = ((part[:, None] == part[:, :, None]) | (part[:, None] == 0)).tril()
        mask = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)[:, None]
        return self.label_loss(self.states(ids, features, attention_mask=mask, position_ids=position)[-1], label)

    def _parts(self, said: Sequence[tuple[str, str]]) -> Iterator[tuple[list[int], int]]:
        """Return the ids up to the image, and those of each question and its answer, with the length of the answer."""
        for i, (question, answer) in enumerate(said):
            if question not in self._known:
                self._known[question] = self.encode(question)
            before, after = self._known[question]
            if i == 0:
                yield before, 0
            ids = self.tokenizer(f"{answer}{END}")["input_ids"]
            yield [*after, *ids], len(ids)

    def encode(self, question: str) -> tuple[list[int], list[int]]:
        """Return the ids of a prompt with an image and a question, up to the image and after it."""
        content = [{"type": "image"}, {"type": "text", "text": question}]
        tools = [tool.schema for tool in shapes.family.tools]
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tools=tools, add_generation_prompt=True, tokenize=False
        )
        before, after = text.split(IMAGE)
        image = f"{_FAKE}{_GLOBAL}{IMAGE * len(POSITIONS)}{_FAKE}"
        ids = (self.tokenizer(part)["input_ids"] for part in (before + image, after))
        return next(ids), next(ids)


def questions(scene: Sequence[Shape]) -> Iterator[tuple[str, str]]:
    """Yield questions about a scene and their answers, more than the family asks."""
    yield "How many shapes are there?", str(len(scene))
    if len(scene) == 1:
        yield "What colour is the shape?", scene[0].colour
        yield "Where is the shape?", POSITIONS[scene[0].cell]
    forms = [shape.form for shape in scene]
    for shape in scene:
        if forms.count(shape.form) == 1:
            yield f"What colour is the {shape.form}?", shape.colour
            yield f"Where is the {shape.form}?", POSITIONS[shape.cell]


def build(
    out: str | Path | None = None,
    *,
    seed: int = 0,
    steps: Sequence[int] = STEPS,
    report: Callable[[str], None] = lambda line: None,
    made: VisionPretraining | None = None,
) -> tuple[Any, Any]:
    """Train a policy from random weights, and return its model and its processor. Takes about a minute on one core.

    Args:
        out: folder to save model and processor in.
        seed: seed of the weights, images and questions.
        steps: updates of the three phases.
        report: called with a line of text after each phase.
        made: what to train; by default the pretraining of `shapes`.
    """
    made = Pretraining(*untrained(seed), seed) if made is None else made
    for (name, lr), count in zip(made.phases, steps, strict=True):
        began = time.process_time()
        made.train(getattr(made, name), count, lr)
        report(f"{name}: {count} steps, {time.process_time() - began:.1f} cpu s")
    made.model.half()
    if out is not None:
        made.model.save_pretrained(out)
        (Path(out) / "model.safetensors").chmod((Path(out) / "config.json").stat().st_mode)
        made.processor.image_processor.save_pretrained(out)
        made.processor.save_pretrained(out)
    return made.model.float(), made.processor
