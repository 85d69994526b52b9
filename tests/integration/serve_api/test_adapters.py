"""LoRA adapters over one served base: each answers as the merged model does alone."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from api_client import Served, serving
from api_processes import server_process
from small_models import make_llama
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import UserError
from tightfit.engines.open import EngineRequest, open_engine
from tightfit.engines.protocol import Engine
from tightfit.export.convert import convert_to_gguf, plan_conversion
from tightfit.runtime.model_files import find_artefact
from tightfit.serving.http.adapters import find_adapter

BASES = ("plain", "gguf")
NAMES = ("one", "two", "three")
PROMPT = "How many singers are older"
NUM_TOKENS = 12


def _make_adapter(folder: Path, base: Path, *, seed: int, **settings: Any) -> Path:
    """Low-rank changes by dice, large enough to change every answer."""
    import peft
    import torch
    import transformers

    library: Any = transformers
    model = library.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(seed)
    given: dict[str, Any] = {"target_modules": "all-linear", "r": 4, "lora_alpha": 8, **settings}
    config = peft.LoraConfig(task_type="CAUSAL_LM", **given)
    adapted: Any = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(folder)
    return folder


def _merged_answers(base: Path, adapter: Path | None) -> tuple[str, list[int]]:
    """What transformers' own `generate` says with the adapter merged into the weights."""
    import peft
    import torch
    import transformers

    library: Any = transformers
    model = library.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        made: Any = peft.PeftModel.from_pretrained(model, adapter)
        model = made.merge_and_unload()
    tokenizer = library.AutoTokenizer.from_pretrained(base)
    given = tokenizer(PROMPT, add_special_tokens=False, return_tensors="pt")
    out = model.generate(**given, max_new_tokens=NUM_TOKENS, do_sample=False)
    new = out[0][given["input_ids"].shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True), given["input_ids"][0].tolist()


def _last_states(base: Path, adapter: Path, tokens: list[int]) -> Any:
    """By transformers and peft themselves: (tokens, width)."""
    import peft
    import torch
    import transformers

    library: Any = transformers
    model = library.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    made: Any = peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        output = made.merge_and_unload()(torch.tensor([tokens]), output_hidden_states=True)
    return output.hidden_states[-1][0]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("adapters")
    base = make_llama(home / "base")
    convert_to_gguf(base, home / "base.gguf", dtype=Dtype.FP32)
    for number, name in enumerate((*NAMES, "late")):
        adapter = _make_adapter(home / "root" / name, base, seed=number)
        target = home / "root" / f"{name}.gguf"
        plan_conversion(str(adapter), to="gguf-lora", target=target).run()
    return home


@pytest.fixture(scope="module")
def engines(home: Path) -> list[Engine]:
    made: list[Engine] = []
    for name, end in (("base", ""), ("base.gguf", ".gguf")):
        request = EngineRequest(
            artefact=find_artefact(str(home / name)), slots=4, takes_adapters=True
        )
        base = open_engine(request)
        made.append(base)
        made += base.add_adapters([home / "root" / f"{name}{end}" for name in NAMES])
    return made


@pytest.fixture(scope="module")
def served(engines: list[Engine], home: Path) -> Iterator[Served]:
    """Both bases, and the adapters over each as `plain-one`, ..., `gguf-three`."""
    names = tuple(name for base in BASES for name in (base, *(f"{base}-{one}" for one in NAMES)))
    with serving(*engines, names=names, adapter_roots=(home / "root",)) as running:
        yield running


@pytest.fixture(scope="module")
def expected(home: Path) -> dict[str, str]:
    """By the adapter's name; `base` without one."""
    found = {"base": _merged_answers(home / "base", None)[0]}
    for name in (*NAMES, "late"):
        found[name] = _merged_answers(home / "base", home / "root" / name)[0]
    assert len(set(found.values())) == len(found), "an adapter changes nothing"
    return found


def _complete(served: Served, model: str, **settings: Any) -> str:
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, **settings}
    answer = served.http.post("/v1/completions", json={"model": model, **body})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"]).rstrip("\ufffd")


def _change(served: Served, verb: str, **body: Any) -> httpx.Response:
    return served.http.post(f"/v1/{verb}_lora_adapter", json=body)


@pytest.mark.parametrize("base", BASES)
def test_each_adapter_answers_as_its_merged_model_beside_the_others(
    served: Served, expected: dict[str, str], base: str
) -> None:
    """Eight clients at once; each asks every adapter and the base."""
    wanted = [(base, "base"), *((f"{base}-{name}", name) for name in NAMES)]

    def ask(client: int) -> list[bool]:
        turns = [wanted[(client + turn) % len(wanted)] for turn in range(len(wanted))]
        return [
            _complete(served, model) == expected[name].rstrip("\ufffd") for model, name in turns
        ]

    with ThreadPoolExecutor(8) as clients:
        assert all(all(each) for each in clients.map(ask, range(8)))


def test_models_name_their_parents_and_a_base_needs_no_name(served: Served) -> None:
    listed = {one["id"]: one for one in served.http.get("/v1/models").json()["data"]}
    assert [listed[f"plain-{name}"]["parent"] for name in NAMES] == ["plain"] * 3
    assert (listed["plain"]["parent"], listed["gguf-two"]["parent"]) == (None, "gguf")
    assert listed["plain-one"]["root"] == "one"


@pytest.mark.parametrize("base", BASES)
def test_scores_and_embeddings_are_the_adapters_own(served: Served, home: Path, base: str) -> None:
    import peft
    import torch
    import transformers

    library: Any = transformers
    model = library.AutoModelForCausalLM.from_pretrained(home / "base", dtype=torch.float32)
    made: Any = peft.PeftModel.from_pretrained(model, home / "root" / "two")
    tokens = list(range(10, 30))
    with torch.no_grad():
        output = made.merge_and_unload()(torch.tensor([tokens]), output_hidden_states=True)
    own = output.logits[0].log_softmax(-1)
    wanted = [float(own[at, token]) for at, token in enumerate(tokens[1:])]
    body = {"model": f"{base}-two", "prompt": tokens, "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = served.http.post("/v1/completions", json=body).json()
    scores = answer["choices"][0]["logprobs"]["token_logprobs"][1:]
    tolerance = 2e-3 if base == "plain" else 0.05
    assert scores == pytest.approx(wanted, abs=tolerance)

    state = torch.nn.functional.normalize(output.hidden_states[-1][0].mean(0), dim=0)
    body = {"model": f"{base}-two", "input": tokens}
    found = served.http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    assert found == pytest.approx(state.tolist(), abs=1e-5 if base == "plain" else 5e-3)


@pytest.mark.parametrize(("base", "end"), [("plain", ""), ("gguf", ".gguf")])
def test_loading_and_unloading_under_load_loses_no_answer(
    served: Served, expected: dict[str, str], base: str, end: str
) -> None:
    is_over = threading.Event()

    def ask(name: str) -> int:
        num_asked = 0
        while not is_over.is_set() or num_asked < 2:
            model = base if name == "base" else f"{base}-{name}"
            assert _complete(served, model) == expected[name].rstrip("\ufffd")
            num_asked += 1
        return num_asked

    with ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(ask, name) for name in ("base", *NAMES)]
        for _ in range(2):
            loaded = _change(served, "load", lora_name="late", lora_path=f"late{end}")
            assert loaded.status_code == 200, loaded.text
            assert "added successfully" in loaded.text
            assert _complete(served, "late") == expected["late"].rstrip("\ufffd")
            dropped = _change(served, "unload", lora_name="late")
            assert dropped.status_code == 200, dropped.text
            gone = served.http.post("/v1/completions", json={"model": "late", "prompt": "a"})
            assert gone.status_code == 404
        is_over.set()
        assert all(one.result() >= 2 for one in asked)


@pytest.mark.parametrize("end", ["", ".gguf"])
def test_an_answer_under_way_ends_on_the_adapter_it_began_with(served: Served, end: str) -> None:
    _change(served, "load", lora_name="late", lora_path=f"late{end}").raise_for_status()
    whole = _complete(served, "late", max_tokens=300, ignore_eos=True)
    body = {
        "model": "late",
        "prompt": PROMPT,
        "max_tokens": 300,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    said = ""
    dropping = None
    with (
        ThreadPoolExecutor(1) as pool,
        served.http.stream("POST", "/v1/completions", json=body) as stream,
    ):
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            said += json.loads(line[6:])["choices"][0]["text"]
            if dropping is None:
                dropping = pool.submit(_change, served, "unload", lora_name="late")
        assert dropping is not None
        assert dropping.result().status_code == 200
    assert said.rstrip("\ufffd") == whole


def test_what_is_refused_has_a_reason(served: Served, home: Path) -> None:
    root = home / "root"
    shutil.copytree(root / "one", home / "outside")
    (root / "link").symlink_to(home / "outside")
    (root / "sly").mkdir()
    (root / "sly" / "adapter_config.json").symlink_to(home / "outside" / "adapter_config.json")
    _make_adapter(root / "dora", home / "base", seed=1, use_dora=True)
    other = make_llama(home / "other", hidden_size=32)
    _make_adapter(root / "foreign", other, seed=1)
    shutil.copytree(root / "one", root / "cut")
    weights = root / "cut" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (root / "cut.gguf").write_bytes((root / "one.gguf").read_bytes()[:-100])

    paths = (str(home / "outside"), "../outside", "link", "sly", "nowhere", "dora", "foreign")
    for path in (*paths, "cut", "cut.gguf", "\0", str(home / "base.gguf"), ""):
        answer = _change(served, "load", lora_name="new", lora_path=path)
        assert answer.status_code == 400, path
        assert answer.json()["error"]["code"] == "invalid_adapter", path
    taken = _change(served, "load", lora_name="plain-one", lora_path="two")
    assert taken.json()["error"]["code"] == "name_taken"
    taken = _change(served, "load", lora_name="plain", lora_path="two", load_inplace=True)
    assert taken.json()["error"]["code"] == "name_taken"
    assert _change(served, "unload", lora_name="plain").status_code == 404
    assert "new" not in {one["id"] for one in served.http.get("/v1/models").json()["data"]}


def test_what_failed_to_load_changes_no_answer(served: Served, expected: dict[str, str]) -> None:
    for base in BASES:
        assert _complete(served, base) == expected["base"].rstrip("\ufffd")
        assert _complete(served, f"{base}-one") == expected["one"].rstrip("\ufffd")


def test_an_adapter_may_take_anothers_name(served: Served, expected: dict[str, str]) -> None:
    for path in ("two", "late"):
        given = {"lora_name": "swapped", "lora_path": path, "load_inplace": True}
        assert _change(served, "load", **given).status_code == 200
        assert _complete(served, "swapped") == expected[path].rstrip("\ufffd")
    assert _change(served, "unload", lora_name="swapped").status_code == 200


def test_an_adapter_adds_its_own_bytes_alone(engines: list[Engine], home: Path) -> None:
    base: Any = engines[0]
    weights = home / "root" / "late" / "adapter_model.safetensors"

    def count(model: Any) -> int:
        return sum(p.numel() * p.element_size() for p in model.parameters())

    before = base.call(count)
    (late,) = base.add_adapters([home / "root" / "late"])
    added = base.call(count) - before
    late.close()
    assert added == late.info.weight_bytes
    assert added == pytest.approx(weights.stat().st_size, rel=0.2)  # names and shapes beside
    assert base.call(count) == before


def test_a_path_without_an_adapter_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"adapter_config\.json"):
        find_adapter(tmp_path)


def test_the_command_serves_adapters_beside_their_bases(
    home: Path, expected: dict[str, str]
) -> None:
    root = home / "root"
    adapters = ("--adapter", f"a={root / 'one'}", "--adapter", f"b={root / 'two.gguf'}")
    words = (home / "base", home / "base.gguf", "--name", "plain", "--name", "gguf")
    with server_process(*words, *adapters, "--pooling", "last") as running:
        listed = {one["id"]: one for one in running.ready["models"]}
        assert {name: one["parent"] for name, one in listed.items()} == {
            "plain": None,
            "gguf": None,
            "a": "plain",
            "b": "gguf",
        }
        for name, own in (("plain", "base"), ("gguf", "base"), ("a", "one"), ("b", "two")):
            body = {"model": name, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
            answer = httpx.post(
                f"{running.url}/v1/completions", json=body, trust_env=False, timeout=120
            ).json()
            assert answer["choices"][0]["text"].rstrip("\ufffd") == expected[own].rstrip("\ufffd")
        refused = httpx.post(
            f"{running.url}/v1/load_lora_adapter",
            json={"lora_name": "c", "lora_path": str(root / "two")},
            trust_env=False,
            timeout=60,
        )
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "adapters_not_allowed"
        tokens = list(range(10, 30))
        state = _last_states(home / "base", root / "one", tokens)[-1]
        body = {"model": "a", "input": tokens}
        answer = httpx.post(
            f"{running.url}/v1/embeddings", json=body, trust_env=False, timeout=60
        ).json()
        found = answer["data"][0]["embedding"]
        assert found == pytest.approx((state / state.norm()).tolist(), abs=1e-5)
