"""`h2o-jax info`."""

import platform
from importlib import metadata

import jax
import pytest

import h2o_jax
import pallas_kernels
from h2o_jax import cli
from h2o_jax.cli import info


@pytest.fixture
def on(monkeypatch):
    """Makes a backend the default one, as far as the choice of implementations can tell."""
    return lambda backend: monkeypatch.setattr(jax, "default_backend", lambda: backend)


def refusing(*names):
    def call(*args, implementation, **kwargs):
        if implementation in names:
            raise NotImplementedError(f"{implementation} has no head_dim 128")

    return call


def test_info_shows_versions_devices_and_every_op(capsys):
    assert cli.main(["info"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    shown = dict(lines)
    assert shown["python"] == platform.python_version()
    assert shown["h2o-jax"] == h2o_jax.__version__
    assert shown["jax"] == metadata.version("jax")
    assert shown["flax"] == metadata.version("flax")
    device = jax.devices()[0]
    assert shown[f"{device.platform}:{device.id}"].startswith(device.device_kind)
    assert set(pallas_kernels.__all__) <= set(shown)


def test_the_version_alone(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["--version"])
    assert exit.value.code == 0 and capsys.readouterr().out == f"{h2o_jax.__version__}\n"


def test_absent_package_is_not_installed(monkeypatch):
    def version(name):
        if name == "gguf":
            raise metadata.PackageNotFoundError(name)
        return "1.2.3"

    monkeypatch.setattr(metadata, "version", version)
    shown = dict(info.versions())
    assert shown["gguf"] == "not installed"
    assert shown["tokenizers"] == "1.2.3"


def test_memory_is_shown_where_known(monkeypatch):
    class Device:
        platform, id, device_kind = "gpu", 0, "NVIDIA A100"

        def memory_stats(self):
            return {"bytes_limit": 30 * 2**30}

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert info.devices() == [("gpu:0", "NVIDIA A100, 30.0 GiB for JAX")]


@pytest.mark.parametrize("op", pallas_kernels.__all__)
def test_without_gpu_every_op_is_xla_and_says_why(on, op):
    on("cpu")
    line = info.chosen_implementation(op)
    assert line.startswith("xla: no CUDA GPU (the backend is cpu), so 'pallas' is not tried")


def test_gpu_takes_pallas_first(on, monkeypatch):
    on("gpu")
    monkeypatch.setattr(pallas_kernels, "top_k_pages", refusing())
    line = info.chosen_implementation("top_k_pages")
    why, also = line.split("; ")
    assert why == "pallas: first choice on a gpu, and it takes a typical case"
    assert also == "by name also xla, pallas_interpret"


def test_gpu_falls_back_and_says_why(on, monkeypatch):
    on("gpu")
    monkeypatch.setattr(pallas_kernels, "top_k_pages", refusing("pallas", "pallas_interpret"))
    assert info.chosen_implementation("top_k_pages") == "xla: 'pallas' can't: pallas has no head_dim 128"


SIZES = "num_layers=4 num_kv_heads=2 head_dim=64 max_requests=2 pages_per_request=512".split()


def test_config_says_what_a_state_takes(capsys):
    options = ["--policy", "h2o_sparse_attention", "--dense-layers", "3"]
    assert cli.main(["info", "--config", *SIZES, "page_size=16", *options]) == 0
    shown = [line.strip() for line in capsys.readouterr().out.splitlines() if line]
    keys, summaries = 1024 * 2 * 16 * 64 * 2 * 2, 1024 * 2 * 3 * 64 * 2
    table = 4 * (2 * 512 + 2 + 1024 + 1)
    total = 4 * keys + 3 * summaries + table
    assert shown == [
        "each of 3 layers",
        f"keys and values  {keys / 2**20:.2f} MiB",
        f"summaries        {summaries / 2**10:.2f} KiB",
        "each of 1 dense layers",
        f"keys and values  {keys / 2**20:.2f} MiB",
        "in all",
        f"page table       {table / 2**10:.2f} KiB",
        f"keys and values  {4 * keys / 2**20:.2f} MiB",
        f"summaries        {3 * summaries / 2**20:.2f} MiB",
        f"state            {total / 2**20:.2f} MiB, {total / 16384:,.0f} bytes a token",
    ]


def test_any_number_of_layers_is_computed_from_one(capsys):
    ones = [f"{name}=1" for name in ("num_kv_heads", "head_dim", "max_requests", "pages_per_request")]
    sizes = ["num_layers=99999999", "page_size=1", *ones]
    assert cli.main(["info", "--config", *sizes, "dtype=float32", "--dense-layers", "99999998,0"]) == 0
    out = capsys.readouterr().out
    assert "each of 99999997 layers" in out and "each of 2 dense layers" in out
    assert f"summaries        {99999997 * 12 / 2**30:.2f} GiB" in out
    assert f"keys and values  {99999999 * 8 / 2**20:.2f} MiB" in out


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([*SIZES, "--dense-layers", "1,4"], "--dense-layers: expected layers below num_layers = 4, got [4]"),
        (["num_layers=4"], "--config: num_kv_heads is missing"),
        ([*SIZES, "pages=3"], "--config: unknown field 'pages'; the fields are num_layers, "),
        ([*SIZES, "num_pages=many"], "--config: expected num_pages=NUMBER, got num_pages=many"),
        ([*SIZES, "num_pages"], "--config: expected num_pages=NUMBER, got num_pages="),
        ([*SIZES, "dtype=int8"], "CacheConfig.dtype: expected one of"),
        ([*SIZES, "num_pages=0"], "CacheConfig.num_pages: expected a positive integer, got 0"),
    ],
)
def test_a_config_is_checked(config, message, capsys):
    assert cli.main(["info", "--config", *config]) == 2
    assert message in capsys.readouterr().err
