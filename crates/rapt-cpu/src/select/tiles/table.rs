//! Written by `cargo xtask tune` from tiles.json, which has the figures. Not edited by hand.

use super::{ArchTiles, Tiles, decode, forward};

/// AMD EPYC (family 25 model 17), 2026-11-21, `cargo xtask tune --rounds 4 --arch avx2`.
#[rustfmt::skip]
pub(super) const AVX2: ArchTiles = ArchTiles {
    forward: [
        // float64: head_dim to 64, to 128, more; q_len to 255, to 1023, more
        [[forward(128, 128, true), forward(128, 128, true), forward(128, 256, true)],
         [forward(128, 128, true), forward(128, 128, true), forward(128, 128, true)],
         [forward(128, 128, true), forward(128, 128, true), forward(128, 256, true)]],
        // float32: head_dim to 64, to 128, more; q_len to 255, to 1023, more
        [[forward(128, 128, true), forward(128, 128, true), forward(128, 256, true)],
         [forward(128, 128, true), forward(128, 128, true), forward(128, 256, true)],
         [forward(128, 128, true), forward(128, 128, true), forward(128, 256, true)]],
        // float16: head_dim to 64, to 128, more; q_len to 255, to 1023, more
        [[forward(128, 128, true), forward(128, 128, true), forward(128, 256, true)],
         [forward(128, 128, true), forward(128, 256, true), forward(128, 256, true)],
         [forward(128, 128, true), forward(128, 128, true), forward(128, 256, true)]],
        // bfloat16: head_dim to 64, to 128, more; q_len to 255, to 1023, more
        [[forward(128, 128, true), forward(128, 256, true), forward(128, 512, true)],
         [forward(128, 128, true), forward(128, 128, true), forward(128, 256, true)],
         [forward(256, 128, true), forward(256, 128, true), forward(256, 256, true)]],
    ],
    // One row per group, more; the dtypes as above.
    decode: [
        [decode(256, 8, 1024, 0), decode(512, 8, 0, 0)],
        [decode(512, 8, 1024, 2048), decode(512, 8, 2048, 16384)],
        [decode(512, 32, 1024, 1024), decode(1024, 8, 2048, 2048)],
        [decode(1024, 8, 0, 2048), decode(1024, 8, 2048, 2048)],
    ],
};

/// Intel(R) Xeon(R) Processor (family 6 model 207), 2026-11-21, `cargo xtask tune --rounds 5 --threads 2 --rotate-mb 400 --arch avx512,avx512_bf16`.
#[rustfmt::skip]
pub(super) const AVX512: ArchTiles = ArchTiles {
    forward: [
        // float64: head_dim to 64, to 128, more; q_len to 255, to 1023, more
        [[forward(128, 128, true), forward(128, 128, true), forward(128, 256, true)],
         [forward(128, 128, true), forward(128, 64, true), forward(128, 256, true)],
         [forward(128, 128, true), forward(128, 128, true), forward(128, 256, true)]],
        // float32: head_dim to 64, to 128, more; q_len to 255, to 1023, more
        [[forward(128, 128, true), forward(128, 128, true), forward(128, 256, true)],
         [forward(128, 128, true), forward(128, 128, true), forward(128, 256, true)],
         [forward(128, 128, true), forward(128, 128, true), forward(128, 256, true)]],
        // float16: head_dim to 64, to 128, more; q_len to 255, to 1023, more
        [[forward(128, 128, true), forward(128, 512, true), forward(128, 256, true)],
         [forward(128, 128, true), forward(128, 512, true), forward(128, 256, true)],
         [forward(128, 128, true), forward(128, 512, true), forward(128, 256, true)]],
        // bfloat16: head_dim to 64, to 128, more; q_len to 255, to 1023, more
        [[forward(128, 128, true), forward(128, 512, true), forward(128, 512, true)],
         [forward(128, 128, true), forward(128, 512, true), forward(128, 256, true)],
         [forward(128, 128, true), forward(128, 512, true), forward(128, 256, true)]],
    ],
    // One row per group, more; the dtypes as above.
    decode: [
        [decode(512, 8, 8192, 2048), decode(512, 8, 2048, 2048)],
        [decode(512, 8, 2048, 2048), decode(512, 8, 2048, 16384)],
        [decode(512, 8, 16384, 2048), decode(512, 16, 2048, 4096)],
        [decode(512, 8, 8192, 2048), decode(512, 16, 2048, 4096)],
    ],
};

/// AMD EPYC (family 26 model 2), 2026-11-22, `cargo xtask tune --rounds 7 --threads 2 --rotate-mb 400`.
#[rustfmt::skip]
pub(super) const AVX512_BF16: ArchTiles = ArchTiles {
    forward: [
        // float64: head_dim to 64, to 128, more; q_len to 255, to 1023, more
        [[Tiles::DEFAULT.forward, Tiles::DEFAULT.forward, Tiles::DEFAULT.forward],
         [Tiles::DEFAULT.forward, Tiles::DEFAULT.forward, Tiles::DEFAULT.forward],
         [Tiles::DEFAULT.forward, Tiles::DEFAULT.forward, Tiles::DEFAULT.forward]],
        // float32: head_dim to 64, to 128, more; q_len to 255, to 1023, more
        [[Tiles::DEFAULT.forward, Tiles::DEFAULT.forward, Tiles::DEFAULT.forward],
         [Tiles::DEFAULT.forward, Tiles::DEFAULT.forward, Tiles::DEFAULT.forward],
         [Tiles::DEFAULT.forward, Tiles::DEFAULT.forward, Tiles::DEFAULT.forward]],
        // float16: head_dim to 64, to 128, more; q_len to 255, to 1023, more
        [[Tiles::DEFAULT.forward, Tiles::DEFAULT.forward, Tiles::DEFAULT.forward],
         [Tiles::DEFAULT.forward, Tiles::DEFAULT.forward, Tiles::DEFAULT.forward],
         [Tiles::DEFAULT.forward, Tiles::DEFAULT.forward, Tiles::DEFAULT.forward]],
        // bfloat16: head_dim to 64, to 128, more; q_len to 255, to 1023, more
        [[forward(128, 128, true), forward(128, 128, true), forward(128, 256, true)],
         [forward(128, 128, true), forward(128, 128, true), forward(128, 256, true)],
         [forward(128, 128, true), forward(128, 128, true), forward(128, 256, true)]],
    ],
    // One row per group, more; the dtypes as above.
    decode: [
        [Tiles::DEFAULT.decode, Tiles::DEFAULT.decode],
        [Tiles::DEFAULT.decode, Tiles::DEFAULT.decode],
        [Tiles::DEFAULT.decode, Tiles::DEFAULT.decode],
        [Tiles::DEFAULT.decode, Tiles::DEFAULT.decode],
    ],
};

/// Intel(R) Xeon(R) Processor (family 6 model 167), 2026-11-28, `cargo xtask tune --arch amx --rounds 7`.
#[rustfmt::skip]
pub(super) const AMX: ArchTiles = ArchTiles {
    forward: [
        // float64: head_dim to 64, to 128, more; q_len to 255, to 1023, more
        [[Tiles::DEFAULT.forward, Tiles::DEFAULT.forward, Tiles::DEFAULT.forward],
         [Tiles::DEFAULT.forward, Tiles::DEFAULT.forward, Tiles::DEFAULT.forward],
         [Tiles::DEFAULT.forward, Tiles::DEFAULT.forward, Tiles::DEFAULT.forward]],
        // float32: head_dim to 64, to 128, more; q_len to 255, to 1023, more
        [[forward(128, 128, true), forward(128, 1024, true), forward(128, 1024, true)],
         [forward(128, 128, true), forward(128, 1024, true), forward(128, 1024, true)],
         [forward(128, 128, true), forward(128, 1024, true), forward(128, 512, true)]],
        // float16: head_dim to 64, to 128, more; q_len to 255, to 1023, more
        [[forward(256, 1024, true), forward(256, 512, true), forward(256, 1024, true)],
         [forward(256, 128, true), forward(256, 1024, true), forward(256, 1024, true)],
         [forward(256, 128, true), forward(256, 512, true), forward(256, 512, true)]],
        // bfloat16: head_dim to 64, to 128, more; q_len to 255, to 1023, more
        [[forward(256, 128, true), forward(256, 1024, true), forward(256, 1024, true)],
         [forward(256, 128, true), forward(256, 512, true), forward(256, 1024, true)],
         [forward(256, 512, true), forward(256, 1024, true), forward(256, 1024, true)]],
    ],
    // One row per group, more; the dtypes as above.
    decode: [
        [Tiles::DEFAULT.decode, Tiles::DEFAULT.decode],
        [Tiles::DEFAULT.decode, Tiles::DEFAULT.decode],
        [Tiles::DEFAULT.decode, Tiles::DEFAULT.decode],
        [Tiles::DEFAULT.decode, Tiles::DEFAULT.decode],
    ],
};
