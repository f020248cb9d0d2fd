//! Rows of Q, K and V that are no numbers of the kernel's own: codes of a quantized format, and halves beside them. They become f32
//! where they are loaded, a few keys at a time, into a panel of the thread's scratch memory.
//!
//! ```text
//! for each row, for each run of elements that share a factor:
//!     x[d] = (decode(code[d]) − zero_point) · factor (· global_scale)      each step in f32
//! ```
//! Decoding is exact, and so is the difference; a product with an f32 factor is rounded once. That of an e2m1 code and an e4m3 factor
//! is exact, then the global scale rounds. So each x is the number that dequantizing to f32 gives, whichever way a row is read: in
//! vectors where its codes follow one another, element by element elsewhere. Deliberately absent: a tensor of numbers, and f64.

use std::convert::identity;
use std::marker::PhantomData;

use half::{bf16, f16};
use rapt_core::{DType, codes};

use super::simd::{Part, Real, Simd};
use crate::problem::{ReadRows, RowKind, Scales, Source};

/// What reads rows of a kind with the vectors of `S`.
pub(crate) fn reader<S: CodeVectors>(kind: RowKind) -> ReadRows {
    match kind {
        RowKind::Int8 => read_rows::<S, Int8>,
        RowKind::Uint8 => read_rows::<S, Uint8>,
        RowKind::Int4 => read_rows::<S, Int4>,
        RowKind::E4m3fn => read_rows::<S, E4m3fn>,
        RowKind::E5m2 => read_rows::<S, E5m2>,
        RowKind::E2m1 => read_rows::<S, E2m1>,
        RowKind::F16 => read_rows::<S, f16>,
        RowKind::Bf16 => read_rows::<S, bf16>,
    }
}

/// The greatest and the least factor that goes into a product before or after the code does.
pub(crate) const MOST: f32 = 18_446_744_073_709_551_616.0;
const LEAST: f32 = 1.0 / MOST;

/// Whether a factor may be multiplied with something else than its code.
pub(crate) fn is_moderate(factor: f32) -> bool {
    factor == 0.0 || (LEAST..=MOST).contains(&factor.abs())
}

/// Whether all of `n` factors are.
#[inline(always)]
pub(crate) unsafe fn all_are_moderate<S: CodeVectors>(factors: *const f32, n: usize) -> bool {
    let whole = n / S::LANES * S::LANES;
    // SAFETY: the caller vouches for n factors.
    unsafe {
        let (zero, one) = (S::splat(0.0), S::splat(1.0));
        let mut extreme = zero;
        for at in (0..whole).step_by(S::LANES) {
            let x = S::abs(S::load(factors.add(at)));
            let is_small = S::lt(x, S::splat(LEAST));
            let of_small = S::select(S::eq(x, zero), zero, one);
            // NaN is less than nothing.
            let of_large = S::select(S::lt(x, S::splat(MOST)), zero, one);
            extreme = S::add(extreme, S::select(is_small, of_small, of_large));
        }
        S::reduce_add(extreme) == 0.0 && (whole..n).all(|at| is_moderate(*factors.add(at)))
    }
}

/// As many numbers as a vector has lanes.
#[inline(always)]
unsafe fn lanes<S: Simd<Elem = f32>>(number: impl Fn(usize) -> f32) -> S::V {
    let mut at = [0f32; 16];
    for (lane, at) in at.iter_mut().enumerate().take(S::LANES) {
        *at = number(lane);
    }
    // SAFETY: as many elements as the longest vector has.
    unsafe { S::load(at.as_ptr()) }
}

/// The code of 4 bits at place `n` of those that begin at `ptr`, the lower half of each byte first.
///
/// # Safety
/// `ptr` is valid for reads of `n / 2 + 1` bytes.
#[inline(always)]
unsafe fn half_byte(ptr: *const u8, n: usize) -> u8 {
    // SAFETY: promised by the caller.
    unsafe { *ptr.add(n / 2) >> (n % 2 * 4) & 0xf }
}

/// Vectors that codes are loaded into: [`Simd::LANES`] codes that follow one another to as many numbers, exactly. Those of 4 bits begin at
/// a byte. What is not overridden goes through a table.
pub(crate) trait CodeVectors: Simd<Elem = f32> {
    #[inline(always)]
    unsafe fn load_int8(ptr: *const u8) -> Self::V {
        // SAFETY: the caller vouches for as many codes as there are lanes; so below.
        unsafe { lanes::<Self>(|n| f32::from((*ptr.add(n)).cast_signed())) }
    }
    #[inline(always)]
    unsafe fn load_uint8(ptr: *const u8) -> Self::V {
        // SAFETY: as above.
        unsafe { lanes::<Self>(|n| f32::from(*ptr.add(n))) }
    }
    #[inline(always)]
    unsafe fn load_int4(ptr: *const u8) -> Self::V {
        // SAFETY: as above.
        unsafe { lanes::<Self>(|n| f32::from(codes::from_int4(half_byte(ptr, n)))) }
    }
    #[inline(always)]
    unsafe fn load_e4m3fn(ptr: *const u8) -> Self::V {
        // SAFETY: as above.
        unsafe { lanes::<Self>(|n| codes::E4M3FN_VALUES[usize::from(*ptr.add(n))]) }
    }
    /// What numbers of [`CodeVectors::load_e4m3fn_short`] are short of: a power of two.
    const E4M3FN_SHORT: f32 = 1.0;
    /// Numbers of codes of which none is NaN, divided by [`CodeVectors::E4M3FN_SHORT`].
    #[inline(always)]
    unsafe fn load_e4m3fn_short(ptr: *const u8) -> Self::V {
        // SAFETY: as above.
        unsafe { Self::load_e4m3fn(ptr) }
    }
    /// Whether one of `n` codes is NaN.
    #[inline(always)]
    unsafe fn has_e4m3fn_nan(ptr: *const u8, n: usize) -> bool {
        // SAFETY: the caller vouches for n codes.
        (0..n).any(|n| unsafe { *ptr.add(n) } & 0x7f == 0x7f)
    }
    #[inline(always)]
    unsafe fn load_e5m2(ptr: *const u8) -> Self::V {
        // SAFETY: as above.
        unsafe { lanes::<Self>(|n| codes::E5M2_VALUES[usize::from(*ptr.add(n))]) }
    }
    #[inline(always)]
    unsafe fn load_e8m0(ptr: *const u8) -> Self::V {
        // SAFETY: as above.
        unsafe { lanes::<Self>(|n| codes::from_e8m0(*ptr.add(n)) as f32) }
    }
    #[inline(always)]
    unsafe fn load_e2m1(ptr: *const u8) -> Self::V {
        // SAFETY: as above.
        unsafe { lanes::<Self>(|n| codes::E2M1_VALUES[usize::from(half_byte(ptr, n))]) }
    }
}

/// What one code is: as a vector of them, and alone.
pub(super) trait Element<S: CodeVectors> {
    /// Bytes of an element, or of two that share one.
    const BYTES: usize = 1;
    /// Elements in that many bytes.
    const SHARED: usize = 1;
    /// Whether something is subtracted from it, and whether a scale of the whole tensor multiplies it.
    const HAS_ZERO_POINT: bool = false;
    const HAS_GLOBAL: bool = false;
    /// Whether a code may be infinite.
    const HAS_INFINITE: bool = false;
    /// The next numbers, from a whole byte on.
    unsafe fn load(ptr: *const u8) -> S::V;
    /// What those of [`Element::load_short`] are short of: a power of two.
    const SHORT: f32 = 1.0;
    /// The next numbers divided by [`Element::SHORT`], of codes without [`Element::has_nan`].
    #[inline(always)]
    unsafe fn load_short(ptr: *const u8) -> S::V {
        // SAFETY: promised by the caller.
        unsafe { Self::load(ptr) }
    }
    /// Whether one of `n` codes is a NaN that [`Element::load_short`] does not know.
    #[inline(always)]
    unsafe fn has_nan(_: *const u8, _: usize) -> bool {
        false
    }
    /// One number: the one at `place` of those that share what lies at `ptr`.
    unsafe fn number(ptr: *const u8, place: usize) -> f32;
}

macro_rules! codes {
    ($(
        $code:ident $load:ident { $($constant:ident = $value:expr),* } $(short $short:ident $is_short:ident $has_nan:ident)?
        |$ptr:ident, $place:ident| $number:expr;
    )*) => {$(
        pub(super) struct $code;
        impl<S: CodeVectors> Element<S> for $code {
            $(const $constant: codes!(@ $constant) = $value;)*
            #[inline(always)]
            unsafe fn load(ptr: *const u8) -> S::V {
                // SAFETY: promised by the caller.
                unsafe { S::$load(ptr) }
            }
            $(
                const SHORT: f32 = S::$is_short;
                #[inline(always)]
                unsafe fn load_short(ptr: *const u8) -> S::V {
                    // SAFETY: promised by the caller.
                    unsafe { S::$short(ptr) }
                }
                #[inline(always)]
                unsafe fn has_nan(ptr: *const u8, n: usize) -> bool {
                    // SAFETY: promised by the caller.
                    unsafe { S::$has_nan(ptr, n) }
                }
            )?
            #[inline(always)]
            unsafe fn number($ptr: *const u8, $place: usize) -> f32 {
                // SAFETY: promised by the caller.
                unsafe { $number }
            }
        }
    )*};
    (@ SHARED) => { usize };
    (@ $flag:ident) => { bool };
}

codes! {
    Int8 load_int8 {} |ptr, _place| f32::from((*ptr).cast_signed());
    Uint8 load_uint8 { HAS_ZERO_POINT = true } |ptr, _place| f32::from(*ptr);
    Int4 load_int4 { SHARED = 2 } |ptr, place| f32::from(codes::from_int4(half_byte(ptr, place)));
    E4m3fn load_e4m3fn {} short load_e4m3fn_short E4M3FN_SHORT has_e4m3fn_nan |ptr, _place| codes::E4M3FN_VALUES[usize::from(*ptr)];
    E5m2 load_e5m2 { HAS_INFINITE = true } |ptr, _place| codes::E5M2_VALUES[usize::from(*ptr)];
    E8m0 load_e8m0 {} |ptr, _place| codes::from_e8m0(*ptr) as f32;
    E2m1 load_e2m1 { SHARED = 2, HAS_GLOBAL = true } |ptr, place| codes::E2M1_VALUES[usize::from(half_byte(ptr, place))];
}

macro_rules! floats {
    ($($float:ident $load:ident $widen:path),*) => {$(
        impl<S: CodeVectors> Element<S> for $float {
            const BYTES: usize = size_of::<$float>();
            #[inline(always)]
            unsafe fn load(ptr: *const u8) -> S::V {
                // SAFETY: promised by the caller; a tensor's elements are aligned.
                unsafe { S::$load(ptr.cast()) }
            }
            #[inline(always)]
            unsafe fn number(ptr: *const u8, _: usize) -> f32 {
                // SAFETY: as above.
                $widen(unsafe { ptr.cast::<$float>().read() })
            }
        }
    )*};
}

floats!(f16 load_f16 f16::to_f32, bf16 load_bf16 bf16::to_f32, f32 load identity);

/// See [`ReadRows`].
unsafe fn read_rows<S: CodeVectors, C: Element<S>>(
    source: &Source,
    first: [usize; 3],
    n: usize,
    dim: usize,
    panel: *mut f32,
) {
    // SAFETY: promised by the caller.
    unsafe { S::apart(Read { source, first, n, dim, panel, code: PhantomData::<C> }) }
}

/// What [`ReadRows`] does.
struct Read<'a, C> {
    source: &'a Source,
    first: [usize; 3],
    n: usize,
    dim: usize,
    panel: *mut f32,
    code: PhantomData<C>,
}

impl<S: CodeVectors, C: Element<S>> Part<S> for Read<'_, C> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Read { source, first: [batch, head, j0], n, dim, panel, .. } = self;
        // Copies: behind a reference they would be read again after every store.
        let (rows, scales) = (source.rows, source.scales);
        for j in 0..n {
            let index = [batch, head, j0 + j];
            let row = Row::<C> {
                from: rows.at_key([batch, head, j0 + j, 0]),
                step: rows.strides[3] * rows.size,
                to: panel.wrapping_add(j * dim),
                code: PhantomData,
            };
            // SAFETY: as of the caller: a row of the tensor, and one of the panel.
            unsafe {
                match &scales {
                    None => row.run::<S>((0, dim), Factor { factor: 1.0, zero_point: 0.0, global: 1.0 }),
                    Some(scales) if scales.chunk == 1 => row.channels::<S>(scales, index, dim),
                    Some(scales) => {
                        for (group, d) in (0..dim).step_by(scales.chunk).enumerate() {
                            row.run::<S>((d, dim.min(d + scales.chunk)), scales.of(index, group));
                        }
                    }
                }
            }
        }
    }
}

/// What makes numbers of codes that share it.
#[derive(Clone, Copy)]
pub(super) struct Factor {
    pub(super) factor: f32,
    pub(super) zero_point: f32,
    global: f32,
}

impl Scales {
    /// The factor of group `group` of a row.
    #[inline(always)]
    pub(super) unsafe fn of(&self, [batch, head, j]: [usize; 3], group: usize) -> Factor {
        let at = [batch, head, j, group];
        // SAFETY: the group is one of the row's, and scales lie in memory as their spec says.
        unsafe {
            let zero_point = match &self.zero_point {
                Some(points) => f32::from(*points.at_key(at)),
                None => 0.0,
            };
            Factor { factor: factor(self.descale.dtype, self.at(at)), zero_point, global: self.global }
        }
    }
}

impl Source {
    /// The factors of a head that go to the output instead of its codes: those of channels, that of all of them, or the scale of the whole
    /// tensor beside blocks. Where one of them is not finite they are all 1, and numbers must be formed; answers whether they are finite.
    ///
    /// # Safety
    /// The head is one of the tensor's; `to` has a place for each of `dim` channels, or is nothing.
    pub(crate) unsafe fn output_factors(&self, [batch, head]: [usize; 2], dim: usize, to: Option<*mut f32>) -> bool {
        let Some(scales) = &self.scales else { return false };
        let of = |d: usize| {
            if scales.descale.dtype != DType::F32 {
                return scales.global;
            }
            // SAFETY: the caller vouches for the head and its channels.
            unsafe { scales.of([batch, head, 0], d / scales.chunk).factor }
        };
        let finite = (0..dim).all(|d| of(d).is_finite());
        if let Some(to) = to {
            // SAFETY: the caller vouches for a place for each channel.
            (0..dim).for_each(|d| unsafe { *to.add(d) = if finite { of(d) } else { 1.0 } });
        }
        finite
    }
}

/// One factor, exactly.
#[inline(always)]
unsafe fn factor(dtype: DType, ptr: *const u8) -> f32 {
    // SAFETY: promised by the caller.
    unsafe {
        match dtype {
            DType::F8E8M0FNU => codes::from_e8m0(*ptr) as f32,
            DType::F8E4M3FN => codes::E4M3FN_VALUES[usize::from(*ptr)],
            _ => ptr.cast::<f32>().read(),
        }
    }
}

/// One row of codes, and where its numbers go.
#[derive(Clone, Copy)]
struct Row<C> {
    from: *const u8,
    /// Bytes from element to element, or from pair to pair.
    step: isize,
    to: *mut f32,
    code: PhantomData<C>,
}

impl<C> Row<C> {
    /// Where element `d` lies, with those that share its bytes.
    #[inline(always)]
    fn at<S: CodeVectors>(&self, d: usize) -> *const u8
    where
        C: Element<S>,
    {
        self.from.wrapping_offset((d / C::SHARED) as isize * self.step)
    }

    /// Whether codes follow one another, as vectors load them, from element `d` on.
    #[inline(always)]
    fn is_whole<S: CodeVectors>(&self, d: usize) -> bool
    where
        C: Element<S>,
    {
        self.step == C::BYTES as isize && d.is_multiple_of(C::SHARED)
    }

    /// Element `d` with its factor.
    #[inline(always)]
    unsafe fn element<S: CodeVectors>(&self, d: usize, of: Factor)
    where
        C: Element<S>,
    {
        // SAFETY: promised by the caller.
        unsafe {
            let mut x = C::number(self.at::<S>(d), d % C::SHARED);
            if C::HAS_ZERO_POINT {
                x -= of.zero_point;
            }
            x *= of.factor;
            if C::HAS_GLOBAL {
                x *= of.global;
            }
            *self.to.add(d) = x;
        }
    }

    /// Elements `d0..d1`, which share a factor.
    #[inline(always)]
    unsafe fn run<S: CodeVectors>(&self, (d0, d1): (usize, usize), of: Factor)
    where
        C: Element<S>,
    {
        let mut d = d0;
        // SAFETY: promised by the caller; a vector holds elements of the run alone.
        unsafe {
            if self.is_whole::<S>(d0) {
                let (factor, zero_point, global) = (S::splat(of.factor), S::splat(of.zero_point), S::splat(of.global));
                while d + S::LANES <= d1 {
                    let mut x = C::load(self.at::<S>(d));
                    if C::HAS_ZERO_POINT {
                        x = S::sub(x, zero_point);
                    }
                    x = S::mul(x, factor);
                    if C::HAS_GLOBAL {
                        x = S::mul(x, global);
                    }
                    S::store(self.to.add(d), x);
                    d += S::LANES;
                }
            }
            while d < d1 {
                self.element::<S>(d, of);
                d += 1;
            }
        }
    }

    /// A row whose elements have a factor each.
    #[inline(always)]
    unsafe fn channels<S: CodeVectors>(&self, scales: &Scales, [batch, head, j]: [usize; 3], dim: usize)
    where
        C: Element<S>,
    {
        let first = [batch, head, j, 0];
        let Scales { descale, zero_point, global, .. } = *scales;
        let points_follow = zero_point.is_none_or(|points| points.strides[3] == 1);
        let mut d = 0;
        // SAFETY: as above; blocks of one element have f32 factors.
        unsafe {
            if descale.strides[3] == 1 && points_follow && self.is_whole::<S>(0) {
                let factors = descale.at_key(first).cast::<f32>();
                let points = zero_point.map_or(self.from, |points| points.at_key(first));
                let global = S::splat(global);
                while d + S::LANES <= dim {
                    let mut x = C::load(self.at::<S>(d));
                    if C::HAS_ZERO_POINT {
                        x = S::sub(x, S::load_uint8(points.add(d)));
                    }
                    x = S::mul(x, S::load(factors.add(d)));
                    if C::HAS_GLOBAL {
                        x = S::mul(x, global);
                    }
                    S::store(self.to.add(d), x);
                    d += S::LANES;
                }
            }
            while d < dim {
                self.element::<S>(d, scales.of([batch, head, j], d));
                d += 1;
            }
        }
    }
}

/// One row of Q to consecutive numbers, negated if asked. Only in kernels whose numbers are f32, which alone have sources.
///
/// # Safety
/// As of [`ReadRows`], for one row.
#[inline(always)]
pub(crate) unsafe fn read_query<S: Simd>(
    source: &Source,
    index: [usize; 3],
    dim: usize,
    negate: bool,
    to: *mut S::Elem,
) -> usize {
    debug_assert_eq!(size_of::<S::Elem>(), size_of::<f32>());
    // SAFETY: promised by the caller.
    unsafe {
        (source.read)(source, index, 1, dim, to.cast());
        if negate {
            for d in 0..dim {
                *to.add(d) = S::Elem::ZERO - *to.add(d);
            }
        }
    }
    dim
}
