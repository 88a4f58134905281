"""The whole decoder, of any size that a supported model can have: forward on pages and packed, and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from tests.helpers import tiny_decoder
from tests.properties.attention import Pages, Schedule, schedules
from tests.properties.rows import shapes
from tests.properties.values import DTYPES, Comparison, dtypes, seeds
from tests.properties.ways import BEST, OTHERS, kernels, threads, variants
from zerogap.kernels import AttentionShape, RowBatch
from zerogap.model.decoder import Decoder

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "qwen2": {"architecture": "qwen2", "qkv_bias": True},
    "qwen3": {"architecture": "qwen3", "qk_norm": True},
}


@dataclass(frozen=True)
class Model:
    """vocab: ids that can be sampled; the head has `unused` more rows. scale: factor on all matrices."""

    family: str
    dtype: str
    hidden: int
    intermediate: int
    layers: int
    shape: AttentionShape
    vocab: int
    unused: int
    tied: bool
    scale: float
    seed: int

    def decoder(self, variant: str, trainable: bool = False, seed: int = 0, eos: tuple[int, ...] = ()) -> Decoder:
        """The same weights on every instruction set. seed: another one gives other weights of the same model."""
        base = tiny_decoder(
            dtype=DTYPES[self.dtype],
            trainable=trainable,
            seed=(self.seed + seed) % 2**32,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_layers=self.layers,
            num_heads=self.shape.q_heads,
            num_kv_heads=self.shape.kv_heads,
            head_dim=self.shape.head_dim,
            vocab_size=self.vocab + self.unused,
            max_position_embeddings=1024,
            tie_word_embeddings=self.tied,
            **FAMILIES[self.family],
        )
        if self.scale != 1.0:
            for weight in base.weights.values():
                if weight.data.dim() == 2:
                    weight.data.mul_(self.scale)
        return Decoder(base.config, kernels(variant), base.weights, self.vocab, eos)


@st.composite
def models(draw: st.DrawFn, largest: int = 100, scales: tuple[float, ...] = (1.0,)) -> Model:
    return Model(
        family=draw(st.sampled_from(tuple(FAMILIES))),
        dtype=draw(dtypes),
        hidden=draw(st.integers(1, largest)),
        intermediate=draw(st.integers(1, 2 * largest)),
        layers=draw(st.integers(1, 2)),
        shape=draw(shapes(largest_row=8 * largest)),
        vocab=draw(st.integers(2, 100) | st.integers(2, 1200)),
        unused=draw(st.integers(0, 70)),
        tied=draw(st.booleans()),
        scale=draw(st.sampled_from(scales)),
        seed=draw(seeds),
    )


@dataclass(frozen=True)
class DecoderCase:
    """variant, threads, packed: of the side that computes in chunks on pages (an engine)."""

    model: Model
    schedule: Schedule
    temperature: float
    variant: str
    threads: int
    packed: bool


decoder_cases = st.builds(
    DecoderCase,
    model=models(scales=(1.0, 1.0, 1e-20, 1e-39, 30.0)),
    schedule=schedules(longest=150),
    temperature=st.sampled_from([1.0, 0.6, 0.0]),
    variant=variants,
    threads=st.sampled_from([1, 2]),
    packed=st.booleans(),
)


def random_tokens(count: int, vocab: int, seed: int) -> torch.Tensor:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed))


def check_decoder(case: DecoderCase) -> int:
    """Hidden states and logprobs of a packed forward (a learner) = those of the same rows in chunks on pages, and the
    sampler's logprobs are the learner's."""
    schedule, comparison = case.schedule, Comparison()
    sequences = [random_tokens(n, case.model.vocab, schedule.seed + i) for i, n in enumerate(schedule.lengths)]
    for tokens in sequences[1:]:
        tokens[: schedule.shared] = sequences[0][: schedule.shared]
    learner = case.model.decoder(BEST)
    engine = case.model.decoder(case.variant)
    with torch.no_grad():
        whole = learner.hidden(torch.cat(sequences), RowBatch.pack(schedule.lengths))
        hidden = whole.split(list(schedule.lengths))
        if case.packed:
            engine.pack()
        pages = Pages(schedule, engine.kernels, case.model.layers, case.model.shape, engine.dtype)
        with threads(case.threads):
            if schedule.shared:
                prefix = engine.hidden(sequences[0][: schedule.shared], pages.prefix_rows(), pages.cache)
                comparison.same("the shared prefix", prefix, hidden[0][: schedule.shared])
                pages.fork()
            for spans in schedule.walk():
                tokens = torch.cat([sequences[i][first : first + rows] for i, first, rows in spans])
                outputs = engine.hidden(tokens, pages.rows(spans), pages.cache).split([n for _, _, n in spans])
                for (i, first, n), output in zip(spans, outputs, strict=True):
                    comparison.same(
                        f"rows {first} to {first + n} of sequence {i}", output, hidden[i][first : first + n]
                    )
            keys = torch.arange(4 * len(whole)).view(-1, 4)
            drawn, sampled = engine.sample(engine.logits(whole), keys, case.temperature)
        comparison.same("sampled logprobs", sampled, learner.logprobs(whole, drawn, case.temperature))
    return comparison.values


@dataclass(frozen=True)
class GradientCase:
    """lengths, shared: the packed rows, see RowBatch.pack."""

    model: Model
    lengths: tuple[int, ...]
    shared: tuple[int, ...]
    temperature: float


@st.composite
def gradient_cases(draw: st.DrawFn) -> GradientCase:
    lengths, shared = [draw(st.integers(1, 150))], [0]
    for _ in range(draw(st.integers(0, 3))):
        shared.append(draw(st.just(0) | st.integers(0, lengths[-1] + shared[-1])))
        lengths.append(draw(st.integers(0, 150)))
    model = draw(models(scales=(1.0, 1.0, 1.0, 1e-20)))
    return GradientCase(model, tuple(lengths), tuple(shared), temperature=draw(st.sampled_from([1.0, 0.6])))


def check_gradients(case: GradientCase) -> int:
    """Logprobs and the gradient of every master: the same bits in a second run, on two threads and on every
    instruction set; and the logprobs are those of a forward without gradients."""
    comparison = Comparison()
    rows = RowBatch.pack(case.lengths, case.shared)
    tokens = random_tokens(rows.num_rows, case.model.vocab, case.model.seed)

    def gradients(variant: str, count: int) -> dict[str, torch.Tensor]:
        decoder = case.model.decoder(variant, trainable=True)
        with threads(count):
            logprobs = decoder.logprobs(decoder.hidden(tokens, rows), tokens.roll(1), case.temperature)
            (logprobs * torch.linspace(-1, 1, len(tokens))).sum().backward()
            with torch.no_grad():
                plain = decoder.logprobs(decoder.hidden(tokens, rows), tokens.roll(1), case.temperature)
        comparison.same("logprobs without gradients", plain, logprobs.detach())
        found = {"logprobs": logprobs.detach()}
        for name, weight in decoder.weights.items():
            assert weight.master is not None and weight.master.grad is not None, name
            found[f"gradient of {name}"] = weight.master.grad
        return found

    expected = gradients(BEST, 1)
    for variant, count in [(BEST, 1), (BEST, 2), *((name, 1) for name in OTHERS)]:
        for name, value in gradients(variant, count).items():
            comparison.same(f"{name}, {variant}, {count} threads", value, expected[name])
    return comparison.values
