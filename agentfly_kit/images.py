"""Images in messages and tool results: decoding within limits, identity, and encoding for servers and notebooks.

This module is imported when the first image appears. Only decoding requires Pillow.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentfly_kit._display import Displayable
from agentfly_kit.errors import RunError, SettingsError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Limits of one image. They are checked against the header, before any pixel is decoded.
MAX_PIXELS, MAX_SIDE, MAX_BYTES = 2**22, 8192, 2**24
# Accepted formats. Other formats of Pillow are rarely used, and their decoders are less secure.
_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
# Longest side of a preview in pixels, and maximum sizes in bytes of images that views and the repr show in full.
_PREVIEW_SIDE, _PREVIEW_BYTES, _REPR_BYTES = 240, 8192, 2**17


class Image(Displayable):
    """Immutable RGB image in a message or tool result.

    The image is decoded once, when it is created. Transparent pixels are blended with white, the orientation in EXIF
    data is applied, and 16-bit greys are scaled to 8 bits. Two images are equal if their sizes and pixels are equal.

    Args:
        source: Image of Pillow, matplotlib figure, path, content of a PNG, JPEG, GIF, WebP or BMP file as bytes, or
            data URL. Other URLs are never fetched.

    Attributes:
        size: Width and height in pixels.
        digest: Hash of size and pixels, as 32 hex digits.

    Raises:
        SettingsError: If the source is not an image, is damaged, animated or too large (more than 2048 x 2048 pixels,
            8192 pixels on one side, or 16 MiB), or if Pillow is not installed.
    """

    size: tuple[int, int]
    digest: str

    def __init__(self, source: Any) -> None:
        if isinstance(source, Image):
            self.__dict__.update(source.__dict__)
            return
        try:
            import PIL.Image
        except ImportError as error:
            raise SettingsError("images require Pillow: pip install 'agentfly_kit[images]'") from error
        picture = source if isinstance(source, PIL.Image.Image) else None
        data = None if picture is not None else _read(source)
        try:
            if picture is None:
                picture = PIL.Image.open(io.BytesIO(data or b""), formats=_FORMATS)
            _check_limits(picture)
            pixels = _to_rgb(picture)
        except SettingsError:
            raise
        except PIL.UnidentifiedImageError:
            raise SettingsError("an image must be a PNG, JPEG, GIF, WebP or BMP file, got other data") from None
        except Exception as error:  # damaged files raise errors of many types
            raise SettingsError(f"the image cannot be decoded ({type(error).__name__}: {error})") from error
        self.size = pixels.size
        self.digest = _digest(pixels)
        file = io.BytesIO()
        pixels.save(file, "PNG")
        self._data: bytes | Path = file.getvalue()

    @classmethod
    def stored(cls, folder: Path, digest: str, width: int, height: int) -> Image:
        """Return an image whose file, written by `store`, is read when its pixels are first needed."""
        image = cls.__new__(cls)
        image.size, image.digest, image._data = (width, height), digest, folder / f"{digest}.png"
        return image

    def store(self, folder: Path) -> None:
        """Write the image to the folder, unless it is already there. The name of the file contains the digest."""
        path = folder / f"{self.digest}.png"
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(self.png)
            os.replace(temporary, path)

    @property
    def png(self) -> bytes:
        """Content of a PNG file with the image.

        Raises:
            RunError: If the file of a saved rollout cannot be read.
        """
        if isinstance(self._data, Path):
            try:
                self._data = self._data.read_bytes()
            except OSError as error:
                raise RunError(f"an image of a saved rollout cannot be read: {error}") from error
        return self._data

    @property
    def data_url(self) -> str:
        """Content of the PNG file as a data URL."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"

    def to_pil(self) -> Any:
        """Return the image as an RGB image of Pillow.

        Raises:
            RunError: If the pixels in a file of a saved rollout were changed after saving.
        """
        import PIL.Image

        picture = PIL.Image.open(io.BytesIO(self.png), formats=("PNG",))
        if picture.size != self.size or _digest(picture) != self.digest:
            raise RunError(f"the file {self.digest}.png was changed after the rollout was saved")
        return picture

    @functools.cached_property
    def preview(self) -> str:
        """Data URL of a small version for views; "" if it cannot be created, for example without Pillow."""
        try:
            if len(self.png) <= _PREVIEW_BYTES:
                return self.data_url
            small, file = self.to_pil(), io.BytesIO()
            small.thumbnail((_PREVIEW_SIDE, _PREVIEW_SIDE))
            small.save(file, "JPEG")
            return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
        except Exception:  # a missing or damaged file must not break a view
            return ""

    def __getstate__(self) -> dict[str, Any]:
        # Another process may be unable to read the file.
        return {"size": self.size, "digest": self.digest, "_data": self.png}

    @property
    def html(self) -> str:
        """`<img>` element with the preview or, if there is none, a description."""
        style = f"max-width:{_PREVIEW_SIDE}px;max-height:{_PREVIEW_SIDE}px;vertical-align:middle"
        return f'<img style="{style}" src="{self.preview}" alt="{self}">' if self.preview else str(self)

    @property
    def full_html(self) -> str:
        """Element with the image itself, or with the preview if its file is large."""
        small = bool(self.preview) and len(self.png) <= _REPR_BYTES
        shown = f'<img style="max-width:100%" src="{self.data_url}" alt="{self}">' if small else self.html
        return f"<div>{shown}</div>"

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Image) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        return f"[image {self.size[0]} x {self.size[1]}]"

    def __repr__(self) -> str:
        return f"Image({self.size[0]} x {self.size[1]}, {self.digest})"


def from_part(source: Any) -> Image:
    """Convert the value of a message part of type "image" or "image_url" to an image.

    A string must be a data URL, because messages may come from other programs, which must not read files.

    Raises:
        SettingsError: If the image is invalid or is given by another URL or a path.
    """
    if isinstance(source, Mapping):
        source = source.get("url")
    if isinstance(source, str) and not source.startswith("data:"):
        raise SettingsError(
            f"an image part must be a data URL or an image such as af.Image(path), got {source[:80]!r}"
        )
    return _from_url(source) if isinstance(source, str) else Image(source)


@functools.lru_cache(maxsize=16)
def _from_url(url: str) -> Image:
    """Decode a data URL. Cached, because endpoint clients send all images with each request."""
    return Image(url)


def row_keys(ids: npt.NDArray[np.int64], spans: Iterable[tuple[Image, int, int]]) -> npt.NDArray[np.int64]:
    """Return ids, (T,), in which the ids of placeholders are replaced by keys that differ for different images.

    Equal ids do not mean equal inputs of a model, because the placeholders of all images have the same ids. Code that
    shares computations between rows with a common prefix must therefore compare keys. The key of a placeholder is a
    hash of its image, of its index among the placeholders of the image, and of their number. Keys are larger than any
    id.

    Args:
        ids: Token ids.
        spans: An image, the index of its first placeholder, and the number of placeholders, for each span.
    """
    import numpy as np

    keys = ids.copy()
    for image, start, length in spans:
        words = hashlib.shake_128(f"{image.digest}:{length}".encode()).digest(8 * length)
        keys[start : start + length] = (np.frombuffer(words, "<u8") >> np.uint64(3)).astype(np.int64) + 2**40
    return keys


def _read(source: Any) -> bytes:
    """Return the content of an image file that is given as bytes, path, data URL or figure."""
    if isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
    elif callable(save := getattr(source, "savefig", None)):
        file = io.BytesIO()
        save(file, format="png")
        data = file.getvalue()
    elif isinstance(source, str) and source.startswith("data:"):
        head, _, text = source.partition(",")
        if not head.startswith("data:image/") or not head.endswith(";base64"):
            raise SettingsError(
                f"a data URL must begin with 'data:image/png;base64,' or similar, got {source[:60]!r}"
            )
        try:
            data = base64.b64decode(text[: 2 * MAX_BYTES], validate=True)
        except (binascii.Error, ValueError) as error:
            raise SettingsError(f"the data URL of an image is not valid base64 ({error})") from None
    elif isinstance(source, str) and "://" in source:
        raise SettingsError(f"images are not downloaded; pass the bytes or the path of a file, got {source[:80]!r}")
    elif isinstance(source, str | os.PathLike):
        try:
            with open(source, "rb") as file_on_disk:
                data = file_on_disk.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            raise SettingsError(f"an image cannot be read: {error}") from error
    else:
        raise SettingsError(
            "an image must be a Pillow image, a matplotlib figure, bytes, a path or a data URL, got "
            f"{type(source).__name__}"
        )
    if len(data) > MAX_BYTES:
        raise SettingsError(f"the file of an image must have at most {MAX_BYTES:,} bytes, got more")
    return data


def _check_limits(picture: Any) -> None:
    """Raise SettingsError if a picture is too large, empty or animated. Its pixels need not be decoded yet."""
    width, height = picture.size
    if not 1 <= min(width, height) <= max(width, height) <= MAX_SIDE or width * height > MAX_PIXELS:
        raise SettingsError(
            f"an image must have sides of 1 to {MAX_SIDE} pixels and at most {MAX_PIXELS:,} pixels, got "
            f"{width} x {height}; make it smaller with picture.thumbnail((1024, 1024))"
        )
    # Photos of some phones contain a second, smaller picture ("MPO").
    if getattr(picture, "is_animated", False) and picture.format != "MPO":
        raise SettingsError("an image must not be animated; pass one of its frames")


def _to_rgb(picture: Any) -> Any:
    """Return a copy in mode RGB without metadata."""
    import PIL.Image
    import PIL.ImageOps

    picture = PIL.ImageOps.exif_transpose(picture)
    if picture.mode in ("I", "F"):
        raise SettingsError(
            f"an image must not have mode {picture.mode!r}, whose range of values is undefined; scale it to 0 to 255 "
            "and use picture.convert('L')"
        )
    if picture.mode.startswith("I;16"):
        picture = picture.convert("I").point(lambda value: value * (1 / 257)).convert("L")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = PIL.Image.alpha_composite(PIL.Image.new("RGBA", picture.size, "white"), picture)
    rgb = picture.convert("RGB")
    rgb.info = {}  # otherwise, the PNG file would contain a colour profile or a transparent colour
    return rgb


def _digest(picture: Any) -> str:
    return hashlib.blake2b(b"%dx%d:" % picture.size + picture.tobytes(), digest_size=16).hexdigest()
