//! `wgmma.mma_async.m64nNk*`: four warps; D in registers, A in registers or shared memory, B in shared memory.
//!
//! ```text
//! warp = thread / 32, group = thread % 32 / 4, quad = thread % 4, w = 32 / bits
//! D (64 × N): value i:              row = 16·warp + group + 8·(i / 2 % 2),   column = 2·quad + i % 2 + 8·(i / 4)
//! A (64 × k): register r, value j:  row = 16·warp + group + 8·(r % 2),       column = w·quad + j + 4w·(r / 2)
//! shared, K-major, span of s bytes:  byte = Sw(row·s + column·bytes);   MN-major: byte = Sw(column·s + row·bytes)
//! ```
//! A shared tile here is one span wide and as long as asked: groups of 8 lines lie 8·s bytes apart (the descriptor's stride
//! offset), the tile starts at a multiple of 8·s.

use super::{Atom, Map, Role, dtype_of, number_after, thread_value};
use crate::composed::ComposedLayout;
use crate::dtype::Dtype;
use crate::layout::Layout;
use crate::swizzle::Swizzle;
use crate::unit::Unit;

const SOURCE: &str = "PTX ISA, \"Register Fragments and Shared Memory Matrix Layouts\" of wgmma.mma_async";
const SHARED: &str = "PTX ISA, \"Shared Memory Matrix Layout\" and \"Swizzling Modes\" of wgmma.mma_async";

pub(super) fn atom(shape: &str, dtype: &str, operand: &str) -> Option<Atom> {
    let (n, k) = shape.strip_prefix("m64n")?.split_once('k')?;
    let (n, k) = (number_after(n, "")?, number_after(k, "")?);
    if n % 8 != 0 || !(8..=256).contains(&n) {
        return None;
    }
    use Dtype::{Bf16, E4m3, E5m2, F16, F32, S8, S32, Tf32, U8};
    let (role, cols, bits, tv) = match operand {
        "d" if [8, 16, 32].contains(&k) => {
            let dtype = dtype_of(dtype, &[F32, S32, F16])?;
            let tv = thread_value(&[(4, 128), (8, 1), (4, 16)], &[(2, 64), (2, 8), (n / 8, 512)])?;
            (Role::Accumulator, n, dtype.bits(), tv)
        }
        "a" => {
            let dtype = dtype_of(dtype, &[F16, Bf16, Tf32, E4m3, E5m2, S8, U8])?;
            let w = i64::from(32 / dtype.bits());
            if k != 8 * w {
                return None;
            }
            let tv = thread_value(&[(4, 64 * w), (8, 1), (4, 16)], &[(w, 64), (2, 8), (2, 256 * w)])?;
            (Role::Operand, k, dtype.bits(), tv)
        }
        _ => return None,
    };
    Some(Atom {
        name: String::new(),
        about: format!(
            "{} of wgmma.{shape}, {dtype}, 64 × {cols}, in the registers of four warps",
            operand.to_uppercase()
        ),
        source: SOURCE,
        role,
        rows: 64,
        cols,
        bits,
        map: Map::Registers { tv },
    })
}

pub(super) fn shared(major: &str, swizzle: &str, rest: &[&str]) -> Option<Atom> {
    let (dtype, lines) = match rest {
        [dtype] => (dtype, 64),
        [dtype, lines] => (dtype, number_after(lines, "x").filter(|n| n % 8 == 0 && (8..=256).contains(n))?),
        _ => return None,
    };
    let dtype: Dtype = dtype.parse().ok()?;
    let span = match swizzle {
        "none" => 16,
        "32b" => 32,
        "64b" => 64,
        "128b" => 128,
        _ => return None,
    };
    let bytes = i64::from(dtype.bits() / 8);
    let (rows, cols, layout) = match major {
        "k" => (lines, span / bytes, Layout::new([lines, span / bytes], [span, bytes])),
        // Only 16-bit operands may be read against their grain.
        "mn" if bytes == 2 => (span / bytes, lines, Layout::new([span / bytes, lines], [bytes, span])),
        _ => return None,
    };
    let layout = ComposedLayout::new(Swizzle::of_span(span).ok()?, 0, layout.ok()?).ok()?;
    Some(Atom {
        name: String::new(),
        about: format!("A wgmma operand in shared memory, {major}-major, {swizzle} swizzle, {dtype}, {rows} × {cols}"),
        source: SHARED,
        role: Role::Operand,
        rows,
        cols,
        bits: dtype.bits(),
        map: Map::Storage { unit: Unit::SharedBytes, layout },
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::maps_as;
    use super::*;

    #[test]
    fn the_maps_are_the_formulas_of_the_ptx_isa() {
        let check = |name: &str, formula: fn(i64, i64) -> (i64, i64)| maps_as(name, 128, formula);
        check("wgmma.m64n32k16.f32.d", |t, i| {
            (16 * (t / 32) + t % 32 / 4 + 8 * (i / 2 % 2), 8 * (i / 4) + t % 4 * 2 + i % 2)
        });
        check("wgmma.m64n8k16.f16.a", |t, i| {
            (16 * (t / 32) + t % 32 / 4 + 8 * (i / 2 % 2), 8 * (i / 4) + t % 4 * 2 + i % 2)
        });
        check("wgmma.m64n8k32.e4m3.a", |t, i| {
            (16 * (t / 32) + t % 32 / 4 + 8 * (i / 4 % 2), 16 * (i / 8) + t % 4 * 4 + i % 4)
        });
    }

    #[test]
    fn the_128_byte_swizzle_moves_chunks_of_16_bytes() {
        let atom = Atom::named("wgmma.smem.k.128b.f16").unwrap();
        assert_eq!((atom.rows, atom.cols), (64, 64));
        let Map::Storage { layout, .. } = &atom.map else { panic!("storage") };
        assert_eq!(layout.to_string(), "Sw<3,4,3> o 0 o (64,64):(128,2)");
        // Row 3, column 9: chunk 1 becomes chunk 1 ^ 3.
        assert_eq!(layout.at_coord(&[3, 9].into()).unwrap(), 3 * 128 + (1 ^ 3) * 16 + 2);
        let turned = Atom::named("wgmma.smem.mn.64b.bf16.x16").unwrap();
        assert_eq!((turned.rows, turned.cols), (32, 16));
        assert!(Atom::named("wgmma.smem.mn.64b.e4m3").is_err(), "bytes are K-major");
    }
}
