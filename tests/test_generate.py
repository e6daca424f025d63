"""generate.py: seeded sampling against the model's own probabilities, nothing leaks in or out."""

import copy
import random

import pytest
import torch
from conftest import make_adapter, make_llama, make_neox

import generate as module
import logprobs
from batches import pack
from generate import folded, generate
from models import adapter, add_lora, add_twin, bare, load_model

END = {0}


@pytest.fixture(scope="module")
def models(folders, adapters):
    """Both architectures with a random adapter, as the training scripts load them."""
    return {name: add_lora(load_model(str(folder), torch.device("cpu")),
                                 adapter=str(adapters[name]))
            for name, folder in folders.items()}


@pytest.fixture(params=["llama", "neox"])
def model(request, models):
    return models[request.param]


def make_prompts(count, seed=0, longest=20):
    rng = random.Random(seed)
    return [[rng.randrange(4, 290) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def logits_after(model, ids):
    """The next token's logits behind `ids`, in a forward of this row alone, without a cache."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].double()


def ask(model, prompts, seeds=None, **options):
    options = {"max_new_tokens": 8, "temperature": 0.8, "end_ids": END, "batch_size": 7} | options
    return generate(model, prompts, seeds or [str(i) for i in range(len(prompts))], **options)


# --- the distribution -----------------------------------------------------------------------------

def chi_square(counts, expected):
    """Pearson's statistic over cells of at least five expected draws, the rest in one; and cells.

    Standardised: (X - df) / sqrt(2 df), about a standard normal variable.
    """
    large = expected >= 5
    counts = torch.cat([counts[large], counts[~large].sum()[None]])
    expected = torch.cat([expected[large], expected[~large].sum()[None]])
    statistic = ((counts - expected) ** 2 / expected.clamp_min(1e-9)).sum()
    degrees = len(counts) - 1
    return ((statistic - degrees) / (2 * degrees) ** 0.5).item(), degrees


@pytest.mark.parametrize("temperature", [0.8, 1.0, 2.5])
def test_eq_sampling_follows_the_softmax_at_its_temperature(models, temperature):
    """Choice 10: frequencies of the first and second token of 3,000 answers are softmax(z / T),
    and no other temperature's. The second token's expectation is given the drawn first one."""
    model, prompt, count = models["llama"], [17, 5, 200, 44], 3000
    written = ask(model, [prompt] * count, max_new_tokens=2, temperature=temperature,
                  end_ids=[289], batch_size=500)
    first = torch.tensor([tokens[0] for tokens, _ in written])
    logits = logits_after(model, prompt)
    counts = torch.bincount(first, minlength=290).double()
    z, degrees = chi_square(counts, count * torch.softmax(logits / temperature, 0))
    assert degrees > 5 and abs(z) < 4, z
    wrong, _ = chi_square(counts, count * torch.softmax(logits / (temperature * 2), 0))
    assert wrong > 8
    expected, seen = torch.zeros(290, dtype=torch.float64), torch.zeros(290, dtype=torch.float64)
    for token in first.unique().tolist():
        after = [tokens[1] for tokens, _ in written if tokens[0] == token and len(tokens) == 2]
        seen += torch.bincount(torch.tensor(after, dtype=torch.long), minlength=290)
        expected += len(after) * torch.softmax(
            logits_after(model, [*prompt, token]) / temperature, 0)
    z, degrees = chi_square(seen, expected)
    assert degrees > 5 and abs(z) < 4, z


def test_the_sampler_is_the_inverse_of_the_cumulative_distribution():
    """Every u in [0, 1) by counting, its ends included; a token of probability zero never comes."""
    scores = torch.tensor([[-torch.inf, 0.3, -torch.inf, 1.2, -0.4, -torch.inf]])
    p = torch.softmax(scores[0].double() / 0.8, 0)
    for u in [0.0, *torch.rand(200, generator=torch.Generator().manual_seed(0)).tolist(),
              1 - 2**-24]:
        sampler = module._SeededSampler(torch.tensor([[0.0, u]]), 3, 0.8)
        chosen = sampler(torch.zeros(1, 4, dtype=torch.long), scores)[0]
        expected = int((p.cumsum(0) <= u).sum())
        assert (chosen == 0).nonzero().item() == min(expected, 4)
        assert (chosen == -torch.inf).sum() == 5
    for count in range(2, 300):  # some sums of the probabilities fall short of this u by rounding
        last = torch.tensor([[0.0] * count + [-torch.inf]])
        sampler = module._SeededSampler(torch.tensor([[1 - 2**-24]]), 0, 1.0)
        assert sampler(torch.zeros(1, 0, dtype=torch.long), last)[0].argmax() == count - 1
    exact = torch.tensor([[0.0] * 8])  # an edge of the steps: u = 1/8 is the second token's
    sampler = module._SeededSampler(torch.tensor([[0.125]]), 0, 1.0)
    assert sampler(torch.zeros(1, 0, dtype=torch.long), exact)[0].argmax() == 1


def test_greedy_is_the_argmax_and_transformers_own(model):
    """temperature 0: each prompt alone, without cache or padding, and transformers' generate."""
    prompts = make_prompts(9)
    for (tokens, complete), prompt in zip(ask(model, prompts, temperature=0.0), prompts,
                                          strict=True):
        ids = list(prompt)
        while len(ids) - len(prompt) < 8 and ids[len(prompt):][-1:] != [0]:
            ids.append(int(logits_after(model, ids).argmax()))
        assert tokens == ids[len(prompt):] and complete == (tokens[-1] == 0)
        theirs = model.generate(input_ids=torch.tensor([prompt]), do_sample=False,
                                max_new_tokens=8, attention_mask=torch.ones(1, len(prompt)))
        assert tokens == theirs[0, len(prompt):].tolist()


# --- what an answer depends on --------------------------------------------------------------------

def test_answers_do_not_depend_on_batch_order_or_the_global_generator(model):
    """The same (seed, prompt) alone, in batches of any size, in any order, after other draws."""
    prompts = make_prompts(12, longest=30)
    whole = ask(model, prompts)
    assert len({tuple(tokens) for tokens, _ in whole}) > 8
    torch.manual_seed(99)
    torch.rand(5)
    for size in (1, 5, 64):
        assert ask(model, prompts, batch_size=size) == whole
    order = random.Random(1).sample(range(12), 12)
    shuffled = ask(model, [prompts[i] for i in order], [str(i) for i in order], batch_size=5)
    assert shuffled == [whole[i] for i in order]


def test_answers_depend_on_their_seed_and_leave_the_global_generator_alone(model):
    (prompt,) = make_prompts(1, seed=3)
    state = torch.get_rng_state()
    written = [tuple(tokens) for tokens, _ in ask(model, [prompt] * 30)]
    assert torch.equal(torch.get_rng_state(), state)
    assert len(set(written)) > 20
    again = [tuple(tokens) for tokens, _ in ask(model, [prompt] * 30)]
    assert again == written
    same = ask(model, [prompt] * 3, ["a", "b", "a"])
    assert same[0] == same[2] != same[1]


def test_the_models_own_generation_config_does_not_leak_in(model):
    """top-k, a repetition penalty, a temperature, banned tokens set on the model: no effect, and
    the model's own configuration is in its place again afterwards, after an error as well."""
    prompts, causal_lm = make_prompts(8), model.get_base_model()
    clean = ask(model, prompts), ask(model, prompts, temperature=0.0)
    before = causal_lm.generation_config
    loud = copy.deepcopy(before)
    loud.update(do_sample=True, top_k=1, top_p=0.1, temperature=0.01, repetition_penalty=9.0,
                min_new_tokens=7, suppress_tokens=list(range(100, 289)), max_length=3,
                no_repeat_ngram_size=1, bad_words_ids=[[50]], num_beams=3, eos_token_id=77)
    causal_lm.generation_config = loud
    try:
        assert (ask(model, prompts), ask(model, prompts, temperature=0.0)) == clean
        assert causal_lm.generation_config is loud
        with pytest.raises(IndexError):
            ask(model, prompts, ["a seed too few"])
        assert causal_lm.generation_config is loud
        # The settings do something when nothing keeps them out.
        theirs = model.generate(input_ids=torch.tensor(prompts[:1]), max_new_tokens=8,
                                attention_mask=torch.ones(1, len(prompts[0])))
        assert theirs[0, len(prompts[0]):].tolist() != clean[1][0][0]
    finally:
        causal_lm.generation_config = before


def test_training_mode_and_checkpointing_survive(folders, adapters):
    """A model in training mode writes the same, and is in training mode again."""
    prompts, made = make_prompts(5), []
    for checkpointing in (False, True):
        model = add_lora(load_model(str(folders["llama"]), torch.device("cpu")),
                               adapter=str(adapters["llama"]), checkpointing=checkpointing)
        training = model.training
        made.append(ask(model, prompts))
        assert model.training == training and model.get_base_model().training == training
    assert made[0] == made[1]


# --- where an answer ends -------------------------------------------------------------------------

def test_an_answer_ends_with_its_first_end_token_or_is_cut(model):
    """Several end tokens; the first one is part of the answer, a cut answer has none."""
    prompts = make_prompts(40, seed=5)
    drawn = {token for tokens, _ in ask(model, prompts, max_new_tokens=12) for token in tokens}
    endless = ask(model, prompts, max_new_tokens=12, end_ids=[max(set(range(2, 290)) - drawn)])
    drawn = [token for tokens, _ in endless for token in tokens]
    assert len(drawn) == 40 * 12
    ends = {max(set(drawn), key=drawn.count), drawn[7]}
    written = ask(model, prompts, max_new_tokens=12, end_ids=ends)
    assert {complete for _, complete in written} == {True, False}
    for (tokens, complete), (free, _) in zip(written, endless, strict=True):
        where = [i for i, token in enumerate(free) if token in ends]
        assert tokens == (free[:where[0] + 1] if where else free)
        assert complete == bool(where)
        assert complete or (len(tokens) == 12 and not set(tokens) & ends)
    assert any(len(tokens) < 12 for tokens, _ in written)


def test_the_head_reads_contiguous_rows(model):
    """Else torch copies the whole head once a prompt; the hook is gone afterwards."""
    head, seen = bare(model).get_output_embeddings(), []
    watch = head.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].is_contiguous()))
    ask(model, make_prompts(5), max_new_tokens=3)
    watch.remove()
    assert seen == [True] * 3 and not head._forward_pre_hooks



@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_that_only_ends_gives_empty_answers(temperature):
    """A bare end token is an answer: empty, complete."""
    model = only_ends(make_neox())
    assert ask(model, make_prompts(9), temperature=temperature) == [([0], True)] * 9


def only_ends(neox):
    """A GPT-NeoX whose every position predicts token 0."""
    with torch.no_grad():
        neox.gpt_neox.final_layer_norm.bias.fill_(3.0)
        neox.get_output_embeddings().weight[0] = 3.0
    return neox.eval()


def test_nothing_to_answer(model):
    assert ask(model, []) == []


def test_one_new_token(model):
    """The smallest limit: one token, complete only if it is the end."""
    for tokens, complete in ask(model, make_prompts(9), max_new_tokens=1):
        assert len(tokens) == 1 and complete == (tokens == [0])


# --- the folded adapter ---------------------------------------------------------------------------

def weights_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_folded_logits_equal_unfolded_and_the_weights_come_back_bitwise(model):
    """W + BA in one matrix gives the same logits to 1e-5; afterwards every bit is as before."""
    ids, before = torch.tensor([make_prompts(1, longest=40)[0] * 3]), weights_of(model)
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        with folded(model):
            inside, moved = model(input_ids=ids).logits, weights_of(model)
        after = model(input_ids=ids).logits
        with model.disable_adapter():
            base = model(input_ids=ids).logits
    torch.testing.assert_close(inside, plain, rtol=1e-5, atol=1e-5 * plain.abs().max().item())
    assert torch.equal(after, plain)
    assert not torch.allclose(base, plain, atol=0.1)  # the adapter does something
    assert {n for n in before if not torch.equal(before[n], moved[n])} == {
        n for n in before if n.endswith("base_layer.weight")}
    now = weights_of(model)
    assert [name for name in before if not torch.equal(before[name], now[name])] == []


def test_folding_is_undone_after_an_error_and_leaves_gradients_alone(model):
    before = weights_of(model)
    with pytest.raises(ZeroDivisionError), folded(model):
        raise ZeroDivisionError
    now = weights_of(model)
    assert [name for name in before if not torch.equal(before[name], now[name])] == []
    rows = [{"input_ids": list(range(5, 15)), "trained": [0] * 4 + [1] * 6}]
    trained = [p for p in model.parameters() if p.requires_grad]
    logps, _ = logprobs.sequence_logprobs(model, pack(rows))
    expected = torch.autograd.grad(-logps.sum(), trained)
    ask(model, make_prompts(3))
    logps, _ = logprobs.sequence_logprobs(model, pack(rows))
    for a, b in zip(torch.autograd.grad(-logps.sum(), trained), expected, strict=True):
        assert torch.equal(a, b)


def test_only_the_active_adapter_is_folded(folders, tmp_path):
    """With a second adapter on the same base (--correction), answers are the first one's; and
    with the adapter switched off, the base's."""
    first = make_adapter(folders["llama"], tmp_path / "first", seed=1)
    model = add_lora(load_model(str(folders["llama"]), torch.device("cpu")),
                           adapter=str(first))
    prompts = make_prompts(6)
    alone = ask(model, prompts)
    twin = add_twin(model, "theta_hat")
    with torch.no_grad():
        for parameter in twin:
            parameter.add_(0.3)
    assert ask(model, prompts) == alone
    with adapter(model, "theta_hat"):
        assert ask(model, prompts) != alone
    with model.disable_adapter():
        off = ask(model, prompts)
    assert off != alone
    assert off == ask(load_model(str(folders["llama"]), torch.device("cpu")), prompts)


def test_float64_and_padding(folders):
    """Left padding isolates: a short prompt beside a long one, in float64, equals it alone."""
    model = load_model(str(folders["neox"]), torch.device("cpu"), "float64")
    short, long = [9, 8], make_prompts(1, seed=9)[0] * 5
    for temperature in (0.0, 0.8):
        pair = ask(model, [short, long[:90]], temperature=temperature)
        assert pair[0] == ask(model, [short], ["0"], temperature=temperature)[0]


def test_bare_model_without_an_adapter():
    """No PEFT around it: the same loop."""
    model = make_llama(3).eval()
    assert len(ask(model, make_prompts(3))) == 3


# --- what a GPU does otherwise --------------------------------------------------------------------

@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_static_cache_writes_the_same_answers(model, temperature):
    """Wider padding and a cache of fixed size, uncompiled here: the same tokens."""
    prompts = make_prompts(9)
    found = ask(model, prompts, temperature=temperature, static_cache=True)
    assert found == ask(model, prompts, temperature=temperature, static_cache=False)


def test_a_failing_static_cache_falls_back_to_the_plain_loop(model, monkeypatch):
    """Once, with one warning; an error that no compiler raised is not swallowed."""
    from torch._dynamo.exc import TorchDynamoException

    prompts, causal_lm = make_prompts(9), model.get_base_model()
    expected, whole, tried = ask(model, prompts), causal_lm.generate, []

    def breaks(*args, generation_config, **options):
        tried.append(generation_config.cache_implementation)
        if generation_config.cache_implementation == "static":
            raise TorchDynamoException("no compiler\nand more")
        return whole(*args, generation_config=generation_config, **options)

    monkeypatch.setattr(causal_lm, "generate", breaks)
    said = "without a static cache: TorchDynamoException: .*no compiler"
    with pytest.warns(UserWarning, match=said):
        assert ask(model, prompts, static_cache=True) == expected
    assert tried == ["static", None, None]
    for cache in (False, True):
        monkeypatch.setattr(causal_lm, "generate", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ask(model, prompts, static_cache=cache)


def test_batches_halve_when_memory_is_short(model, monkeypatch):
    """The same answers; a single prompt that does not fit is an error."""
    prompts, causal_lm = make_prompts(9), model.get_base_model()
    expected, whole, sizes = ask(model, prompts), causal_lm.generate, []

    def limited(input_ids, most=2, **options):
        sizes.append(len(input_ids))
        if len(input_ids) > most:
            raise torch.cuda.OutOfMemoryError("out of memory")
        return whole(input_ids=input_ids, **options)

    monkeypatch.setattr(causal_lm, "generate", limited)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert ask(model, prompts, batch_size=8) == expected
    assert sizes == [8, 4, 2, 2, 2, 2, 1]
    monkeypatch.setattr(causal_lm, "generate", lambda **options: limited(most=0, **options))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        ask(model, prompts)
