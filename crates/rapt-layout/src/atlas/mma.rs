//! `mma.sync.m16n8k*`: one warp, everything in registers.
//!
//! ```text
//! group = thread / 4, quad = thread % 4, w = 32 / bits values in a register
//! A (16 × k): register r, value j:   row = group + 8·(r % 2),   column = w·quad + j + 4w·(r / 2)
//! B (k × 8):  register r, value j:   row = w·quad + j + 4w·r,   column = group
//! C (16 × 8): value i:               row = group + 8·(i / 2),   column = 2·quad + i % 2
//! ```

use super::{Atom, Map, Role, dtype_of, thread_value};
use crate::dtype::Dtype;

const SOURCE: &str = "PTX ISA, \"Matrix Fragments for mma.m16n8k8\", \"… mma.m16n8k16 with floating point type\", \
                      \"… mma.m16n8k16 with integer type\" and \"… mma.m16n8k32\"";

pub(super) fn atom(shape: &str, dtype: &str, operand: &str) -> Option<Atom> {
    let k = match shape {
        "m16n8k8" => 8,
        "m16n8k16" => 16,
        "m16n8k32" => 32,
        _ => return None,
    };
    use Dtype::{Bf16, E4m3, E5m2, F16, F32, S8, S32, Tf32, U8};
    let dtype = match operand {
        "c" => dtype_of(dtype, if k == 8 { &[F32, F16] } else { &[F32, F16, S32] })?,
        _ => dtype_of(
            dtype,
            match k {
                8 => &[F16, Bf16, Tf32],
                16 => &[F16, Bf16, S8, U8],
                _ => &[S8, U8, E4m3, E5m2],
            },
        )?,
    };
    let w = i64::from(32 / dtype.bits());
    // Groups of 4w along k: a register holds w of one for each thread of a quad.
    let groups = k / (4 * w);
    let (rows, cols, tv) = match operand {
        "a" => (16, k, thread_value(&[(4, 16 * w), (8, 1)], &[(w, 16), (2, 8), (groups, 64 * w)])?),
        "b" => (k, 8, thread_value(&[(4, w), (8, k)], &[(w, 1), (groups, 4 * w)])?),
        "c" => (16, 8, thread_value(&[(4, 32), (8, 1)], &[(2, 16), (2, 8)])?),
        _ => return None,
    };
    let role = if operand == "c" { Role::Accumulator } else { Role::Operand };
    let about =
        format!("{} of mma.sync.{shape}, {dtype}, {rows} × {cols}, in the registers of a warp", operand.to_uppercase());
    Some(Atom {
        name: String::new(),
        about,
        source: SOURCE,
        role,
        rows,
        cols,
        bits: dtype.bits(),
        map: Map::Registers { tv },
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::maps_as;
    use super::*;

    /// The index formulas of the PTX ISA, written out.
    #[test]
    fn the_maps_are_the_formulas_of_the_ptx_isa() {
        let check = |name: &str, formula: fn(i64, i64) -> (i64, i64)| maps_as(name, 32, formula);
        // f16, k16: row is group for a0 a1 a4 a5, column quad·2 + (i & 1), + 8 from a4 on.
        check("mma.m16n8k16.f16.a", |t, i| {
            (t / 4 + if matches!(i, 0 | 1 | 4 | 5) { 0 } else { 8 }, t % 4 * 2 + i % 2 + if i < 4 { 0 } else { 8 })
        });
        check("mma.m16n8k16.bf16.b", |t, i| (t % 4 * 2 + i % 2 + if i < 2 { 0 } else { 8 }, t / 4));
        check("mma.m16n8k8.f16.a", |t, i| (t / 4 + if i < 2 { 0 } else { 8 }, t % 4 * 2 + i % 2));
        check("mma.m16n8k8.tf32.a", |t, i| (t / 4 + i % 2 * 8, t % 4 + if i < 2 { 0 } else { 4 }));
        check("mma.m16n8k8.tf32.b", |t, i| (t % 4 + i * 4, t / 4));
        check("mma.m16n8k16.s8.a", |t, i| (t / 4 + if i < 4 { 0 } else { 8 }, t % 4 * 4 + i % 4));
        check("mma.m16n8k32.s8.a", |t, i| {
            let low = matches!(i, 0..=3 | 8..=11);
            (t / 4 + if low { 0 } else { 8 }, t % 4 * 4 + i % 4 + if i < 8 { 0 } else { 16 })
        });
        check("mma.m16n8k32.e4m3.b", |t, i| (t % 4 * 4 + i % 4 + if i < 4 { 0 } else { 16 }, t / 4));
        check("mma.m16n8k16.f32.c", |t, i| (t / 4 + if i < 2 { 0 } else { 8 }, t % 4 * 2 + i % 2));
    }

    #[test]
    fn the_tv_layouts_are_the_known_ones() {
        let tv = |name: &str| match Atom::named(name).unwrap().map {
            Map::Registers { tv } => tv.to_string(),
            Map::Storage { .. } => unreachable!(),
        };
        assert_eq!(tv("mma.m16n8k16.f16.a"), "((4,8),(2,2,2)):((32,1),(16,8,128))");
        assert_eq!(tv("mma.m16n8k16.f32.c"), "((4,8),(2,2)):((32,1),(16,8))");
        assert_eq!(tv("mma.m16n8k8.tf32.a"), "((4,8),(2,2)):((16,1),(8,64))");
    }
}
