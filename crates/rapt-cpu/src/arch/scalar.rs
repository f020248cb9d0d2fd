//! Plain Rust vectors: the path for any processor, and the one that Miri can run. Fixed-size arrays let the compiler use
//! the baseline's own vectors. A product and a sum are rounded each: there is no fused multiply-add to rely on.

use half::{bf16, f16};

use crate::kernels::codes::CodeVectors;
use crate::kernels::simd::Simd;

/// Vectors as arrays of `Self::Elem`.
#[derive(Clone, Copy)]
pub(crate) struct Scalar<T>(std::marker::PhantomData<T>);

const LANES: usize = 4;

macro_rules! scalar {
    ($real:ty, $mantissa:literal, $to_half:ident, $from_half:ident) => {
        impl Simd for Scalar<$real> {
            type Elem = $real;
            type V = [$real; LANES];
            type M = [bool; LANES];
            type W = [u32; LANES];
            const LANES: usize = LANES;
            const ROWS: usize = 4;
            const FUSED: bool = false;

            apart!(apart);

            #[inline(always)]
            unsafe fn splat(x: $real) -> Self::V {
                [x; LANES]
            }
            #[inline(always)]
            unsafe fn load(ptr: *const $real) -> Self::V {
                // SAFETY: promised by the caller.
                unsafe { ptr.cast::<Self::V>().read_unaligned() }
            }
            #[inline(always)]
            unsafe fn store(ptr: *mut $real, x: Self::V) {
                // SAFETY: promised by the caller.
                unsafe { ptr.cast::<Self::V>().write_unaligned(x) }
            }
            #[inline(always)]
            unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
                std::array::from_fn(|n| a[n] + b[n])
            }
            #[inline(always)]
            unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
                std::array::from_fn(|n| a[n] - b[n])
            }
            #[inline(always)]
            unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
                std::array::from_fn(|n| a[n] * b[n])
            }
            #[inline(always)]
            unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
                std::array::from_fn(|n| a[n] / b[n])
            }
            #[inline(always)]
            unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
                std::array::from_fn(|n| a[n] * b[n] + c[n])
            }
            #[inline(always)]
            unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
                std::array::from_fn(|n| if a[n] > b[n] { a[n] } else { b[n] })
            }
            #[inline(always)]
            unsafe fn abs(a: Self::V) -> Self::V {
                a.map(<$real>::abs)
            }
            #[inline(always)]
            unsafe fn lt(a: Self::V, b: Self::V) -> Self::M {
                std::array::from_fn(|n| a[n] < b[n])
            }
            #[inline(always)]
            unsafe fn eq(a: Self::V, b: Self::V) -> Self::M {
                std::array::from_fn(|n| a[n] == b[n])
            }
            #[inline(always)]
            unsafe fn select(m: Self::M, a: Self::V, b: Self::V) -> Self::V {
                std::array::from_fn(|n| if m[n] { a[n] } else { b[n] })
            }
            #[inline(always)]
            unsafe fn pow2(shifted: Self::V) -> Self::V {
                shifted.map(|x| <$real>::from_bits(x.to_bits() << $mantissa))
            }
            #[inline(always)]
            unsafe fn words(ptr: *const u32) -> Self::W {
                // SAFETY: promised by the caller.
                unsafe { ptr.cast::<Self::W>().read_unaligned() }
            }
            #[inline(always)]
            unsafe fn same_word(x: u32) -> Self::W {
                [x; LANES]
            }
            #[inline(always)]
            unsafe fn xor_words(a: Self::W, b: Self::W) -> Self::W {
                std::array::from_fn(|n| a[n] ^ b[n])
            }
            #[inline(always)]
            unsafe fn add_words(a: Self::W, b: Self::W) -> Self::W {
                std::array::from_fn(|n| a[n].wrapping_add(b[n]))
            }
            #[inline(always)]
            unsafe fn multiply_words(a: Self::W, b: u32) -> [Self::W; 2] {
                let products = a.map(|a| u64::from(a) * u64::from(b));
                [products.map(|x| (x >> 32) as u32), products.map(|x| x as u32)]
            }
            #[inline(always)]
            unsafe fn drop_lanes(p: Self::V, words: Self::W, last: u32) -> Self::V {
                std::array::from_fn(|n| if words[n] > last { p[n] } else { (0.0 as $real).copysign(p[n]) })
            }
            #[inline(always)]
            unsafe fn load_f16(ptr: *const f16) -> Self::V {
                // SAFETY: promised by the caller.
                unsafe { ptr.cast::<[f16; LANES]>().read_unaligned() }.map(f16::$to_half)
            }
            #[inline(always)]
            unsafe fn load_bf16(ptr: *const bf16) -> Self::V {
                // SAFETY: promised by the caller.
                unsafe { ptr.cast::<[bf16; LANES]>().read_unaligned() }.map(bf16::$to_half)
            }
            #[inline(always)]
            unsafe fn store_f16(ptr: *mut f16, x: Self::V) {
                // SAFETY: promised by the caller.
                unsafe { ptr.cast::<[f16; LANES]>().write_unaligned(x.map(f16::$from_half)) }
            }
            #[inline(always)]
            unsafe fn store_bf16(ptr: *mut bf16, x: Self::V) {
                // SAFETY: promised by the caller.
                unsafe { ptr.cast::<[bf16; LANES]>().write_unaligned(x.map(bf16::$from_half)) }
            }
            #[inline(always)]
            unsafe fn reduce_add(x: Self::V) -> $real {
                (x[0] + x[2]) + (x[1] + x[3])
            }
            #[inline(always)]
            unsafe fn transpose(src: *const $real, src_stride: usize, dst: *mut $real, dst_stride: usize) {
                for r in 0..LANES {
                    for c in 0..LANES {
                        // SAFETY: both squares are inside buffers of the caller.
                        unsafe { *dst.add(c * dst_stride + r) = *src.add(r * src_stride + c) };
                    }
                }
            }
        }
    };
}

scalar!(f32, 23, to_f32, from_f32);
scalar!(f64, 52, to_f64, from_f64);

impl CodeVectors for Scalar<f32> {}
