"""One measured job: build the model a case describes, run it, record what the allocator saw."""


from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

MODEL_FOLDER = Path(__file__).resolve().parents[1] / "src" / "tightfit" / "catalogue" / "models"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")

# Sizes of a rehearsal without a GPU: every family keeps its shape, nothing keeps its size.
REHEARSAL_SIZES = {
    **{"hidden_size": 64, "n_embd": 64, "d_model": 64, "intermediate_size": 128, "d_ff": 128},
    **{"head_dim": 16, "d_kv": 16, "rotary_dim": 8, "num_attention_heads": 4, "n_head": 4},
    **{"num_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 4, "vocab_size": 512},
    **{"moe_intermediate_size": 32, "num_experts": 8, "num_local_experts": 4, "pad_token_id": 0},
    **{"num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2},
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Everything that decides a job's memory and time; defaults are the plainest job."""

    model: str
    task: str = "train"  # train | eval | load | generate | saved
    method: str = "full"  # full | lora
    weights: str = "bf16"  # fp32 | bf16 | fp16 | nf4 | nf4-double | int8
    autocast: str | None = None  # bf16 | fp16 (with a GradScaler)
    optimizer: str = "adamw-fused"
    lora_rank: int = 16
    lora_targets: str = "all-linear"
    lora_dropout: float = 0.0
    adapters: str = "fp32"  # peft's default, whatever the base weights are
    micro_batch: int = 1
    seq_len: int = 512
    checkpointing: str = "off"  # off | non-reentrant | reentrant
    attention: str = "sdpa"
    loss: str = "plain"  # plain | fused (linear cross entropy only) | liger (all its kernels)
    accumulation: int = 1
    padding: bool = False  # a batch with an attention mask that hides the row ends
    prepare_kbit: bool = False  # peft.prepare_model_for_kbit_training
    keep_outputs: bool = False  # hold the model output (logits) through the backward pass
    clip: bool = False
    num_layers: int | None = None
    fsdp_ranks: int = 0  # per-rank memory of fully_shard on a fake process group
    offload: bool = False  # FSDP2 CPUOffloadPolicy
    expandable_segments: bool = False
    memory_cap_bytes: int = 0
    num_steps: int = 4

    @property
    def name(self) -> str:
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if field.name != "model" and getattr(self, field.name) != field.default
        ]
        return " ".join([self.model, *changed])


class Meter:
    """Allocator readings per phase; on a machine without CUDA every reading is 0."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.peak_phase = ""

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.cuda else 0

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    @contextlib.contextmanager
    def phase(self, name: str, into: dict[str, Any]) -> Iterator[None]:
        before = self.allocated()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        yield
        peak = torch.cuda.max_memory_allocated() if self.cuda else 0
        if peak > self.peak_allocated_bytes:
            self.peak_allocated_bytes, self.peak_phase = peak, name
        reserved = torch.cuda.max_memory_reserved() if self.cuda else 0
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, reserved)
        into[name] = {
            "before_bytes": before,
            "peak_bytes": peak,
            "after_bytes": self.allocated(),
            "reserved_bytes": reserved,
        }

    def outside_torch_bytes(self) -> int:
        """CUDA context, kernels and library workspaces that torch's allocator does not own."""
        if not self.cuda:
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()


def read_config(case: Case, *, rehearse: bool) -> Any:
    from transformers import AutoConfig

    (path,) = MODEL_FOLDER.glob(f"*--{case.model}.json")
    fields = json.loads(path.read_text())
    num_layers = 2 if rehearse and case.num_layers is None else case.num_layers
    if rehearse:
        fields |= {key: size for key, size in REHEARSAL_SIZES.items() if key in fields}
    if num_layers is not None:
        fields |= {key: num_layers for key in LAYER_KEYS if key in fields}
        if "layer_types" in fields:
            fields["layer_types"] = fields["layer_types"][:num_layers]
    fields["use_cache"] = case.task == "generate"
    if fields.get("is_encoder_decoder"):
        fields.setdefault("decoder_start_token_id", 0)
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def build_base(case: Case, config: Any, device: str) -> nn.Module:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    dtype = DTYPES.get(case.weights, torch.bfloat16)
    with torch.device("meta" if case.fsdp_ranks else device):
        model: nn.Module = auto.from_config(config, dtype=dtype, attn_implementation=case.attention)
    if case.weights not in DTYPES:
        quantize_linears(model, case.weights, device)
    return model


def quantize_linears(model: Any, weights: str, device: str) -> None:
    """Replace every linear layer but the head, as transformers does when it loads in 4 or 8 bit."""
    from bitsandbytes import nn as bnb

    head = model.get_output_embeddings()
    linears = [(n, m) for n, m in model.named_modules() if type(m) is nn.Linear and m is not head]
    for name, linear in linears:
        shape = (linear.in_features, linear.out_features, linear.bias is not None)
        data = linear.weight.data
        if weights == "int8":
            new = bnb.Linear8bitLt(*shape, has_fp16_weights=False, threshold=6.0, device="meta")
            # Int8Params quantizes only on the way from the CPU.
            new.weight = bnb.Int8Params(data.cpu(), requires_grad=False).to(device)
        else:
            double = weights == "nf4-double"
            new = bnb.Linear4bit(
                *shape, torch.bfloat16, double, quant_type="nf4", device=torch.device("meta")
            )
            new.weight = bnb.Params4bit(
                data, False, compress_statistics=double, quant_type="nf4", module=new
            ).to(device)
        new.bias = linear.bias
        linear.weight = None
        model.set_submodule(name, new)
    setattr(model, "is_loaded_in_8bit" if weights == "int8" else "is_loaded_in_4bit", True)
    gc.collect()


def attach_adapters(case: Case, model: Any) -> Any:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if case.prepare_kbit:
        model = prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=case.checkpointing != "off",
            gradient_checkpointing_kwargs={"use_reentrant": case.checkpointing == "reentrant"},
        )
    targets = case.lora_targets
    config = LoraConfig(
        r=case.lora_rank,
        lora_alpha=2 * case.lora_rank,
        lora_dropout=case.lora_dropout,
        target_modules=targets if targets == "all-linear" else targets.split(","),
        task_type="SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM",
    )
    model = get_peft_model(model, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(DTYPES[case.adapters])
    return model


def fuse_loss(case: Case, model: Any) -> None:
    from liger_kernel.transformers import monkey_patch

    patch = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
    if case.loss == "liger":
        patch(model=model)
        return
    names = patch.__code__.co_varnames[: patch.__code__.co_argcount]
    off = {n: False for n in names if n not in ("model", "fused_linear_cross_entropy")}
    patch(model=model, fused_linear_cross_entropy=True, **off)


def build_model(case: Case, *, device: str, rehearse: bool) -> tuple[nn.Module, dict[str, int]]:
    """The model ready to train, and its parameter counts (taken before any packing to 4 bit)."""
    config = read_config(case, rehearse=rehearse)
    with torch.device("meta"):
        unpacked = build_base(dataclasses.replace(case, weights="bf16"), config, "meta")
    counts = {"total": sum(p.numel() for p in unpacked.parameters())}
    model: Any = build_base(case, config, device)
    if case.loss != "plain":
        fuse_loss(case, model)
    if case.method == "lora":
        model = attach_adapters(case, model)
        counts["total"] += sum(p.numel() for p in model.parameters() if p.requires_grad)
    if case.checkpointing != "off":
        model.gradient_checkpointing_enable({"use_reentrant": case.checkpointing == "reentrant"})
        if case.method == "lora":
            model.enable_input_require_grads()
    counts["trainable"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if case.fsdp_ranks:
        shard_model(case, model, device)
    model.train()
    return model, counts


def shard_model(case: Case, model: Any, device: str) -> None:
    """Shard as rank 0 of a process group whose collectives do nothing: memory real, values not."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.fsdp_ranks)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device, (case.fsdp_ranks,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    if case.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device == "cuda")
    for module in list(model.modules()):
        if type(module).__name__.endswith("DecoderLayer"):
            fully_shard(module, **options)
    fully_shard(model, **options)
    model.to_empty(device="cpu" if case.offload else device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_(0.0, 0.02)
    for module in model.modules():
        for key, buffer in module._buffers.items():
            module._buffers[key] = torch.zeros_like(buffer, device=device)


def build_optimizer(case: Case, parameters: list[nn.Parameter]) -> Any:
    if case.optimizer.startswith(("adamw-8bit", "paged")):
        from bitsandbytes import optim

        kinds = {
            "adamw-8bit": optim.AdamW8bit,
            "paged-adamw": optim.PagedAdamW,
            "paged-adamw-8bit": optim.PagedAdamW8bit,
        }
        return kinds[case.optimizer](parameters, lr=1e-5)
    if case.optimizer == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(parameters, lr=1e-5, scale_parameter=False, relative_step=False)
    if case.optimizer == "sgd-momentum":
        return torch.optim.SGD(parameters, lr=1e-5, momentum=0.9, foreach=True)
    if case.optimizer == "adamw-foreach":
        return torch.optim.AdamW(parameters, lr=1e-5, foreach=True)
    return torch.optim.AdamW(parameters, lr=1e-5, fused=True)


def draw_batch(case: Case, model: Any, device: str) -> dict[str, torch.Tensor]:
    shape = (case.micro_batch, case.seq_len)
    ids = torch.randint(5, model.config.vocab_size, shape, device=device)
    batch = {"input_ids": ids, "labels": ids}
    if case.padding:
        keep = torch.linspace(0.5, 1.0, case.micro_batch, device=device) * case.seq_len
        mask = (torch.arange(case.seq_len, device=device) < keep[:, None]).long()
        batch |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return batch


def autocast_for(case: Case, device: str) -> Any:
    if case.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(device, dtype=DTYPES[case.autocast])


def train_step(case: Case, job: dict[str, Any], meter: Meter) -> dict[str, Any]:
    """One optimizer step as training loops write it; only the loss outlives the forward pass."""
    model, optimizer, scaler, device = (job[k] for k in ("model", "optimizer", "scaler", "device"))
    phases: dict[str, Any] = {}
    batches = [draw_batch(case, model, device) for _ in range(case.accumulation)]
    meter.synchronize()
    start = time.perf_counter()
    for index, batch in enumerate(batches):
        suffix = f"_{index + 1}" if case.accumulation > 1 else ""
        with meter.phase(f"forward{suffix}", phases), autocast_for(case, device):
            outputs = model(**batch)
            loss = outputs.loss / case.accumulation
            if not case.keep_outputs:
                del outputs
        with meter.phase(f"backward{suffix}", phases):
            scaler.scale(loss).backward()
            del loss
    outputs = None
    with meter.phase("optimizer", phases):
        if case.clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(job["trainable"], 1.0)
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad(set_to_none=True)
    meter.synchronize()
    return {"seconds": time.perf_counter() - start, "phases": phases}


def measure_train(case: Case, model: nn.Module, meter: Meter, device: str) -> dict[str, Any]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    job = {
        "model": model,
        "optimizer": build_optimizer(case, trainable),
        "scaler": torch.amp.GradScaler(device, enabled=case.autocast == "fp16"),
        "device": device,
        "trainable": trainable,
    }
    steps = [train_step(case, job, meter) for _ in range(case.num_steps)]
    return {"first_step": steps[0], "steady_step": steps[-1], **pace(case, steps)}


def pace(case: Case, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Median of the later half: the first steps pay for kernel loading and allocator growth."""
    seconds = statistics.median(step["seconds"] for step in steps[len(steps) // 2 :])
    tokens = case.micro_batch * case.seq_len * case.accumulation
    return {
        "all_step_seconds": [round(step["seconds"], 5) for step in steps],
        "step_seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }


def measure_eval(case: Case, model: nn.Module, meter: Meter, device: str) -> dict[str, Any]:
    model.eval()
    steps = []
    for _ in range(case.num_steps):
        batch, phases = draw_batch(case, model, device), {}
        meter.synchronize()
        start = time.perf_counter()
        with meter.phase("eval_forward", phases), torch.no_grad(), autocast_for(case, device):
            float(model(**batch).loss)
        steps.append({"seconds": time.perf_counter() - start, "phases": phases})
    return {"first_step": steps[0], "steady_step": steps[-1], **pace(case, steps)}


def measure_generate(case: Case, model: Any, meter: Meter, device: str) -> dict[str, Any]:
    """Prefill alone, then prompt plus new tokens: cache size and decode pace by difference."""
    model.eval()
    num_new = 8 if device == "cpu" else 128
    phases: dict[str, Any] = {}
    ids = draw_batch(case, model, device)["input_ids"]
    seconds = {}
    with torch.no_grad():
        before = meter.allocated()
        with meter.phase("prefill", phases):
            outputs = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        cache_bytes = meter.allocated() - before
        del outputs
        for count in (1, num_new):
            meter.synchronize()
            start = time.perf_counter()
            with meter.phase(f"generate_{count}", phases):
                model.generate(
                    ids,
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    attention_mask=torch.ones_like(ids),
                    pad_token_id=0,
                )
            meter.synchronize()
            seconds[f"generate_{count}_seconds"] = time.perf_counter() - start
    return {"steady_step": {"phases": phases}, "prefill_cache_bytes": cache_bytes, **seconds}


SAVED_VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "full eager": {"attention": "eager"},
    "full padding": {"padding": True},
    "full fp32 autocast bf16": {"weights": "fp32", "autocast": "bf16"},
    "full checkpointed": {"checkpointing": "non-reentrant"},
    "lora bf16 adapters": {"method": "lora", "adapters": "bf16"},
    "lora fp32 adapters autocast bf16": {"method": "lora", "autocast": "bf16"},
    "lora fp32 base autocast bf16": {"method": "lora", "weights": "fp32", "autocast": "bf16"},
}


def measure_saved(case: Case, meter: Meter, *, device: str, rehearse: bool) -> dict[str, Any]:
    """What one layer keeps for the backward pass: the difference of a 4- and a 2-layer model."""
    report = {}
    for label, changes in SAVED_VARIANTS.items():
        variant = dataclasses.replace(case, **changes)
        try:
            report[label] = saved_per_layer(variant, meter, device=device, rehearse=rehearse)
        except Exception as error:  # one variant a family lacks must not cost the others
            report[label] = {"error": f"{type(error).__name__}: {error}"[:300]}
        gc.collect()
    return {"saved": report}


def saved_per_layer(case: Case, meter: Meter, *, device: str, rehearse: bool) -> dict[str, Any]:
    held, tensors = {}, {}
    for depth in (2, 4):
        cut = dataclasses.replace(case, num_layers=depth)
        model, _ = build_model(cut, device=device, rehearse=rehearse)
        batch = draw_batch(case, model, device)
        with autocast_for(case, device):
            loss = model(**batch).loss
        loss.backward()  # warm: workspaces exist before the reading
        model.zero_grad(set_to_none=True)
        del loss
        before = meter.allocated()
        with autocast_for(case, device):
            tensors[depth], loss = saved_tensors(model, batch)
        held[depth] = meter.allocated() - before
        del model, batch, loss
        gc.collect()
    per_layer = {k: (n - tensors[2][k]) / 2 for k, n in tensors[4].items() if n != tensors[2][k]}
    outside = {k: n - 2 * per_layer.get(k, 0) for k, n in tensors[2].items()}
    tokens = case.micro_batch * case.seq_len
    slope = (held[4] - held[2]) / 2
    return {
        "bytes_per_token_per_layer": slope / tokens,
        "outside_layers_bytes_per_token": (held[2] - 2 * slope) / tokens,
        "tensors_per_layer": per_layer,
        "tensors_outside_layers": {k: n for k, n in outside.items() if n > 0},
    }


def saved_tensors(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[Counter[str], Any]:
    """Count the distinct storages autograd saves, by dtype and shape; weights are not counted."""
    known = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    counts: Counter[str] = Counter()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in known and tensor.numel() > 1:
            known.add(pointer)
            full = tensor.untyped_storage().nbytes() / tensor.element_size() / tensor.numel()
            share = "" if full == 1 else f" of a storage {full:g}x its size"
            kind = str(tensor.dtype).removeprefix("torch.")
            counts[f"{kind}{list(tensor.shape)}{share}"] += 1
        # Kept as it came, a node's own output would hold that node alive for ever.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(**batch).loss
    return counts, loss


def measure_case(case: Case, *, device: str, rehearse: bool) -> dict[str, Any]:
    if rehearse:
        case = dataclasses.replace(case, seq_len=32, num_layers=case.num_layers and 2)
    if case.expandable_segments and device == "cuda":
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    meter = Meter(device)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    report: dict[str, Any] = {}
    if device == "cuda":
        torch.cuda.init()
        report["context_before_load_bytes"] = meter.outside_torch_bytes()
        if case.memory_cap_bytes:
            total = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction(case.memory_cap_bytes / total)
    if case.task == "saved":
        return report | measure_saved(case, meter, device=device, rehearse=rehearse)
    phases: dict[str, Any] = {}
    with meter.phase("load", phases):
        model, report["parameters"] = build_model(case, device=device, rehearse=rehearse)
    gc.collect()
    if device == "cuda":
        # What loading left cached would hide how much the steps themselves reserve.
        torch.cuda.empty_cache()
    report |= {"load": phases["load"], "allocated_after_load_bytes": meter.allocated()}
    meter.peak_allocated_bytes = meter.peak_reserved_bytes = 0
    measures: dict[str, Callable[..., dict[str, Any]]] = {
        "train": measure_train,
        "eval": measure_eval,
        "generate": measure_generate,
        "load": lambda *_: {},
    }
    report |= measures[case.task](case, model, meter, device)
    stats = torch.cuda.memory_stats() if device == "cuda" else {}
    return report | {
        "peak_allocated_bytes": meter.peak_allocated_bytes,
        "peak_reserved_bytes": meter.peak_reserved_bytes,
        "peak_phase": meter.peak_phase,
        "outside_torch_bytes": meter.outside_torch_bytes(),
        "num_alloc_retries": stats.get("num_alloc_retries", 0),
    }
