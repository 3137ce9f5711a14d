"""FID's network, extractors, and the files that hold features, statistics and samples."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rejects import rejects
from safetensors.torch import save_file

from vargen.compat import import_torch_fidelity
from vargen.eval.features import (
    Extractor,
    FeatureStatistics,
    contains_samples,
    load_extractor,
    module_extractor,
    read_adm_samples,
    stack_images,
    to_uint8_array,
    write_adm_samples,
)
from vargen.models.text_encoder import ImageTextModel


def random_weights() -> dict[str, torch.Tensor]:
    """Weights of FID's network, without loading any."""
    network = import_torch_fidelity("feature_extractor_inceptionv3").FeatureExtractorInceptionV3
    empty = io.BytesIO()
    torch.save({}, empty)
    empty.seek(0)

    class Random(network):
        def load_state_dict(self, state: Any) -> None: ...

    torch.manual_seed(0)
    return Random("random", ["2048"], feature_extractor_weights_path=empty).state_dict()


@pytest.fixture(scope="module")
def inception_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "inception.pth"
    torch.save(random_weights(), path)
    return path


def noise(count: int, size: tuple[int, int] = (32, 32), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *size, 3), dtype=np.uint8)


# -- FID's network ---------------------------------------------------------------------------------------------------------


def test_it_gives_features_and_class_scores(inception_file: Path) -> None:
    features = load_extractor(f"inception:weights={inception_file}")(stack_images(noise(2, (32, 48))))
    assert features.pooled.shape == (2, 2048) and features.logits is not None and features.logits.shape == (2, 1008)
    assert not torch.equal(features.pooled[0], features.pooled[1])


def test_both_weight_files_open_and_their_identity_is_the_weights(inception_file: Path, tmp_path: Path) -> None:
    state = torch.load(inception_file, weights_only=True)
    bare = {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}
    save_file(bare, tmp_path / "inception.safetensors")
    one, two = (load_extractor(f"inception:weights={file}") for file in (inception_file, tmp_path / "inception.safetensors"))
    assert one.identity == two.identity and one.identity.startswith("inception-2015-12-05-")
    save_file({**bare, "fc.bias": bare["fc.bias"] + 1}, tmp_path / "other.safetensors")
    assert load_extractor(f"inception:weights={tmp_path / 'other.safetensors'}").identity != one.identity
    save_file({"fc.bias": bare["fc.bias"]}, tmp_path / "wrong.safetensors")
    with pytest.raises(ValueError, match=r"wrong\.safetensors"):
        load_extractor(f"inception:weights={tmp_path / 'wrong.safetensors'}")
    (tmp_path / "cut.pth").write_bytes(inception_file.read_bytes()[:5000])
    with pytest.raises(ValueError, match="fetch weights-inception"):
        load_extractor(f"inception:weights={tmp_path / 'cut.pth'}")
    for spec in ("inception", f"inception:weights={tmp_path / 'no.pth'}"):
        with pytest.raises(FileNotFoundError, match="fetch weights-inception"):
            load_extractor(spec)


# -- other extractors ----------------------------------------------------------------------------------------------------------


def test_the_packaged_tower_and_any_module_are_extractors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    ImageTextModel(widths=[16, 32], blocks=[1, 1], image_size=32).save_pretrained(tmp_path / "run/scorer")
    tower = load_extractor(str(tmp_path / "run"))
    images = noise(5)
    features = tower(stack_images(images))
    assert features.pooled.shape == (5, 32) and features.logits is None
    (tmp_path / "mine_to_import.py").write_text(
        "import torch\ndef net():\n    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = load_extractor("mine_to_import:net")
    sys.modules.pop("mine_to_import")
    assert torch.allclose(own(stack_images(images)).pooled, torch.from_numpy(images).float().mean((1, 2)) / 255, atol=1e-5)
    assert own.identity != tower.identity
    linear = [module_extractor(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2)), "net") for _ in range(2)]
    assert linear[0].identity != linear[1].identity, "weights are part of an identity"


def test_bad_extractors_and_images_are_refused() -> None:
    broken = Extractor("broken", "broken-1", lambda pixels: torch.full((len(pixels), 3), float("nan")))
    with pytest.raises(ValueError, match="broken gave NaN"):
        broken(stack_images(noise(2)))
    with pytest.raises(ValueError, match=r"must give features \[2, D\]"):
        Extractor("flat", "flat-1", lambda pixels: pixels.float())(stack_images(noise(2)))
    rejects(lambda: broken(torch.rand(2, 3, 8, 8)), "uint8", TypeError)
    with pytest.raises(ValueError, match="of one size, got 32 x 32, 48 x 32"):
        stack_images([noise(1)[0], noise(1, (32, 48))[0]])
    for spec in ("nothing", "inception:weight=x", "clip:modell=x"):
        with pytest.raises(ValueError, match=r"unknown|no option"):
            load_extractor(spec)


def test_an_image_is_cut_to_its_centre_and_scaled() -> None:
    wide = Image.new("RGB", (40, 20), "red")
    wide.paste("white", (10, 0, 30, 20))
    assert (to_uint8_array(wide, 10) == 255).all() and to_uint8_array(wide).shape == (20, 40, 3)
    assert to_uint8_array(wide.convert("L"), 20).shape == (20, 20, 3)


# -- files -----------------------------------------------------------------------------------------------------------------


def test_statistics_survive_their_file(tmp_path: Path) -> None:
    features = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    made = FeatureStatistics.from_features(features, "net-1", (32, 32))
    assert torch.allclose(made.covariance, torch.from_numpy(np.cov(features.double().numpy(), rowvar=False)))
    made.write(tmp_path / "a.npz")
    held = FeatureStatistics.read(tmp_path / "a.npz")
    assert torch.equal(held.mean, made.mean) and torch.equal(held.covariance, made.covariance)
    assert (held.count, held.extractor, held.size) == (50, "net-1", (32, 32)) and torch.equal(held.features, features)
    made.write(tmp_path / "b.npz", compact=True)
    assert torch.allclose(FeatureStatistics.read(tmp_path / "b.npz").covariance, made.covariance, rtol=1e-6)
    few = made.subsample_features(7)
    assert few.features is not None and len(few.features) == 7 and few.count == 50
    assert made.subsample_features(0).features is None
    with np.load(tmp_path / "a.npz") as plain:  # what a published evaluator reads
        assert plain["mu"].shape == (4,) and plain["sigma"].shape == (4, 4)


def test_foreign_statistics_are_refused_but_published_ones_of_inception_pass(tmp_path: Path) -> None:
    ours = FeatureStatistics.from_features(torch.randn(50, 4), "net-1", (32, 32))
    ours.validate_extractor("net-1", "net")
    rejects(lambda: ours.validate_extractor("net-2", "net"), "net-1")
    with pytest.raises(ValueError, match="32 x 32, and these are 64 x 48"):
        ours.validate_size((48, 64))
    ours.validate_size((32, 32))
    np.savez(tmp_path / "adm.npz", mu=np.zeros(2048), sigma=np.eye(2048, dtype=np.float32), mu_s=np.zeros(3), arr_0=noise(2))
    published = FeatureStatistics.read(tmp_path / "adm.npz")
    published.validate_extractor("inception-2015-12-05-abc", "inception")
    published.validate_size((7, 7))
    rejects(lambda: published.validate_extractor("net-1", "net"), "extractor")
    np.savez(tmp_path / "small.npz", mu=np.zeros(288), sigma=np.eye(288))
    with pytest.raises(ValueError, match="288 dimensions"):
        FeatureStatistics.read(tmp_path / "small.npz").validate_extractor("inception-2015-12-05-abc", "inception")


def test_damaged_statistics_are_named(tmp_path: Path) -> None:
    cases = {
        "no_mu.npz": {"sigma": np.eye(3)},
        "shapes.npz": {"mu": np.zeros(4), "sigma": np.eye(3)},
        "nan.npz": {"mu": np.full(3, np.nan), "sigma": np.eye(3)},
        "count.npz": {"mu": np.zeros(3), "sigma": np.eye(3), "vargen_count": "x"},
        "objects.npz": {"mu": np.array([{}], dtype=object), "sigma": np.eye(3)},
    }
    for name, arrays in cases.items():
        np.savez(tmp_path / name, **arrays)
    np.save(tmp_path / "bare.npy", np.zeros(3))
    (tmp_path / "bare.npy").rename(tmp_path / "bare.npz")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "no_mu.npz").read_bytes()[:60])
    for name in [*cases, "bare.npz", "cut.npz"]:
        rejects(lambda name=name: FeatureStatistics.read(tmp_path / name), name)
    rejects(lambda: FeatureStatistics.read(tmp_path / "gone.npz"), "gone", FileNotFoundError)


def test_samples_are_written_and_read_as_the_field_does(tmp_path: Path) -> None:
    images = noise(3, (8, 6))
    write_adm_samples(tmp_path / "s.npz", iter(images), 3, (8, 6))
    with np.load(tmp_path / "s.npz") as plain:
        assert plain["arr_0"].dtype == np.uint8 and np.array_equal(plain["arr_0"], images)
    np.savez(tmp_path / "theirs.npz", images, np.arange(3))  # arr_0, and labels
    for name in ("s.npz", "theirs.npz"):
        shape, found = read_adm_samples(tmp_path / name)
        assert shape == (3, 8, 6, 3) and np.array_equal(np.stack(list(found)), images)
        assert contains_samples(tmp_path / name)
    for wrong in (noise(2, (8, 6)), noise(4, (8, 6)), noise(3, (6, 8))):
        with pytest.raises(ValueError, match="image"):
            write_adm_samples(tmp_path / "wrong.npz", iter(wrong), 3, (8, 6))
    assert not (tmp_path / "wrong.npz").exists() and len(list(tmp_path.iterdir())) == 2
    np.savez(tmp_path / "floats.npz", images.astype(np.float32))
    rejects(lambda: read_adm_samples(tmp_path / "floats.npz"), "uint8")
