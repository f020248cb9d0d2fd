//! Reductions over any dimensions.
//!
//! ```text
//! rows      what goes lies closest:    8 accumulators along it, joined in order        Σ over the last dimensions
//! columns   what stays lies closest:   one accumulator for each of 32 results          Σ over H and W of NHWC
//! ```
//! Elements are taken in row-major order of the dimensions that go, so of equal extrema the first counts, and the first NaN is
//! an extremum. Sums, means and norms are float64 and rounded once.

use std::marker::PhantomData;

use rapt_core::{Arch, DType, float64};

use super::element::{Call, Element, Entry, Num, Sum, Typed, entry, float_entry, plain_entry, plain_float_entry};
use super::{Dim, Dims, Form, Kernel, TILE};

/// What becomes of the elements of a result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FoldFunction {
    /// The sum; 0 of none.
    Sum,
    /// The mean of floats; NaN of none.
    Mean,
    /// The product; 1 of none.
    Product,
    /// Whether one is other than 0.
    Any,
    /// Whether all are other than 0.
    All,
    /// The greatest, and its place where that is asked for. There is at least one element.
    Max,
    /// The least, and its place where that is asked for. There is at least one element.
    Min,
    /// `(Σ |x|^p)^(1/p)` of floats; at 0 the number of those other than 0, at ±∞ the extremum.
    Norm(f64),
}

/// A reduction for operands of given forms: x, the results, and the places of extrema.
#[derive(Clone, Debug)]
pub struct Fold {
    function: FoldFunction,
    out: Option<DType>,
    has_places: bool,
    /// What stays, but for the columns: x, results, places.
    kept: Dims<3>,
    columns: Dim<3>,
    /// What goes, but for the innermost.
    outer: Dims<1>,
    inner: Dim<1>,
    run: Entry<Fold>,
}

/// Accumulators beside one another.
const LANES: usize = 8;

impl Fold {
    /// The reduction of `x` over the dimensions `gone`. `out` is the form of the results and `places` that of the extrema's
    /// places, int64: numbers of elements in row-major order of what goes. Both have the dimensions of `x`, those that go with
    /// size 1. `None` for dtypes and functions that are not served, and for an extremum of no elements.
    #[must_use]
    pub fn new(
        arch: Arch,
        function: FoldFunction,
        x: &Form,
        gone: &[usize],
        out: Option<&Form>,
        places: Option<&Form>,
    ) -> Option<Fold> {
        let none = vec![0; x.shape.len()];
        let strides = |form: Option<&Form>| form.map_or_else(|| none.clone(), |form| form.strides.clone());
        let (out_strides, place_strides) = (strides(out), strides(places));
        let dim = |d: usize| Dim { size: x.shape[d], strides: [x.strides[d], out_strides[d], place_strides[d]] };
        let kept = Dims::new((0..x.shape.len()).filter(|d| !gone.contains(d)).map(dim));
        let along = |d: usize| Dim { size: x.shape[d], strides: [x.strides[d]] };
        let (outer, inner) = Dims::new((0..x.shape.len()).filter(|d| gone.contains(d)).map(along)).split_last();
        let is_extremum = matches!(function, FoldFunction::Max | FoldFunction::Min);
        let needs_one = is_extremum || matches!(function, FoldFunction::Norm(order) if order.is_infinite());
        if (needs_one && outer.count() * inner.size == 0)
            || (places.is_some() && !is_extremum)
            || !fits(function, x.dtype, out.map(|out| out.dtype))
        {
            return None;
        }
        let (kept, columns) = columns(kept, inner);
        let run = function.entry(arch, x.dtype, places.is_some())?;
        let out = out.map(|out| out.dtype);
        Some(Fold { function, out, has_places: places.is_some(), kept, columns, outer, inner, run })
    }

    fn tiles(&self) -> usize {
        self.columns.size.div_ceil(TILE)
    }

    /// How many elements become one result.
    fn each(&self) -> usize {
        self.outer.count() * self.inner.size
    }
}

/// Whether results of a dtype are those of the function of elements of a dtype.
fn fits(function: FoldFunction, x: DType, out: Option<DType>) -> bool {
    let is_float = |dtype: DType| matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16);
    match (function, out) {
        (FoldFunction::Max | FoldFunction::Min, out) => out.is_none_or(|out| out == x),
        (FoldFunction::Any | FoldFunction::All, Some(out)) => matches!(out, DType::Bool | DType::U8),
        (_, Some(out)) => is_float(out) == is_float(x),
        (_, None) => false,
    }
}

/// The dimension that stays whose elements lie closest, apart from the others, where it lies closer than what goes.
fn columns(mut kept: Dims<3>, inner: Dim<1>) -> (Dims<3>, Dim<3>) {
    let near = |dim: &Dim<3>| dim.strides[0].unsigned_abs();
    let closest = (0..kept.0.len()).filter(|&d| near(&kept.0[d]) > 0).min_by_key(|&d| near(&kept.0[d]));
    match closest {
        Some(d) if inner.size == 1 || near(&kept.0[d]) < inner.strides[0].unsigned_abs() => {
            let columns = kept.0.remove(d);
            (kept, columns)
        }
        _ => (kept, Dim { size: 1, strides: [0; 3] }),
    }
}

impl FoldFunction {
    fn entry(self, arch: Arch, dtype: DType, has_places: bool) -> Option<Entry<Fold>> {
        match self {
            FoldFunction::Sum => entry::<Run<Added>>(arch, dtype),
            FoldFunction::Mean => float_entry::<Run<Averaged>>(arch, dtype),
            FoldFunction::Product => plain_entry::<Run<Multiplied>>(dtype),
            FoldFunction::Any => plain_entry::<Run<Any>>(dtype),
            FoldFunction::All => plain_entry::<Run<All>>(dtype),
            FoldFunction::Max if has_places => plain_entry::<Run<Placed<true>>>(dtype),
            FoldFunction::Min if has_places => plain_entry::<Run<Placed<false>>>(dtype),
            FoldFunction::Max => entry::<Run<Extreme<true>>>(arch, dtype),
            FoldFunction::Min => entry::<Run<Extreme<false>>>(arch, dtype),
            FoldFunction::Norm(2.0) => float_entry::<Run<Squared>>(arch, dtype),
            FoldFunction::Norm(_) => plain_float_entry::<Run<Powers>>(dtype),
        }
    }
}

impl Kernel for Fold {
    fn name(&self) -> &'static str {
        match self.function {
            FoldFunction::Sum => "sum",
            FoldFunction::Mean => "mean",
            FoldFunction::Product => "product",
            FoldFunction::Any => "any",
            FoldFunction::All => "all",
            FoldFunction::Max => "max",
            FoldFunction::Min => "min",
            FoldFunction::Norm(_) => "norm",
        }
    }

    fn units(&self) -> usize {
        self.kept.count() * self.tiles()
    }

    fn unit_work(&self) -> usize {
        self.each().saturating_mul(self.columns.size.min(TILE))
    }

    unsafe fn run_units(&self, units: std::ops::Range<usize>, pointers: &[*mut u8], scratch: *mut u8) {
        // SAFETY: promised by the caller; the instruction set is that of `new`.
        unsafe { (self.run)(self, &Call { units, pointers, scratch }) };
    }
}

/// How elements are taken into an accumulator.
trait Function {
    type Acc<T: Element>: Copy;
    fn start<T: Element>(fold: &Fold) -> Self::Acc<T>;
    /// Takes in element number `at`.
    fn push<T: Element>(fold: &Fold, acc: Self::Acc<T>, x: T, at: usize) -> Self::Acc<T>;
    /// Two accumulators as one.
    fn join<T: Element>(fold: &Fold, a: Self::Acc<T>, b: Self::Acc<T>) -> Self::Acc<T>;
    /// Whether the accumulator depends on the order in which others were joined: the first 0 counts.
    fn is_open<T: Element>(_: Self::Acc<T>) -> bool {
        false
    }
    /// Writes the result.
    ///
    /// # Safety
    /// The pointers are valid for writes of the result, and of its place where there is one.
    unsafe fn finish<T: Element>(fold: &Fold, acc: Self::Acc<T>, out: *mut u8, place: *mut u8);
}

struct Run<F>(PhantomData<F>);

impl<F: Function> Typed for Run<F> {
    type Kernel = Fold;
    #[inline(always)]
    unsafe fn run<T: Element>(fold: &Fold, call: &Call<'_>) {
        let x = call.pointers[0].cast_const().cast::<T>();
        let out = fold.out.map_or(0, |dtype| dtype.bits() / 8).cast_signed();
        let place = call.pointers.last().copied().unwrap_or(std::ptr::null_mut());
        let result = call.pointers[usize::from(fold.out.is_some())];
        let tiles = fold.tiles();
        for unit in call.units.clone() {
            let [from, to, to_place] = fold.kept.at(unit / tiles);
            let first = unit % tiles * TILE;
            let width = TILE.min(fold.columns.size - first);
            let [step, out_step, place_step] = fold.columns.strides;
            let mut accs = [F::start::<T>(fold); TILE];
            // SAFETY: the caller vouches for every element that sizes and strides reach.
            unsafe {
                let x = x.offset(from + first.cast_signed() * step);
                if fold.columns.size == 1 {
                    accs[0] = row::<F, T>(fold, x);
                } else {
                    columns_of::<F, T>(fold, x, step, width, &mut accs);
                }
                for (k, acc) in accs.into_iter().enumerate().take(width) {
                    let k = (first + k).cast_signed();
                    let out = result.offset((to + k * out_step) * out);
                    let place = if fold.has_places { place.offset((to_place + k * place_step) * 8) } else { place };
                    F::finish::<T>(fold, acc, out, place);
                }
            }
        }
    }
}

/// One result, of elements that lie along what goes.
#[inline(always)]
unsafe fn row<F: Function, T: Element>(fold: &Fold, x: *const T) -> F::Acc<T> {
    let Dim { size, strides: [step] } = fold.inner;
    let mut accs = [F::start::<T>(fold); LANES];
    for n in 0..fold.outer.count() {
        let [offset] = fold.outer.at(n);
        // SAFETY: promised by the caller.
        unsafe {
            let x = x.offset(offset);
            let whole = size / LANES * LANES;
            // Two loops: the compiler makes vectors of the first.
            if step == 1 {
                for i in (0..whole).step_by(LANES) {
                    for (k, acc) in accs.iter_mut().enumerate() {
                        *acc = F::push(fold, *acc, x.add(i + k).read(), n * size + i + k);
                    }
                }
            } else {
                for i in (0..whole).step_by(LANES) {
                    for (k, acc) in accs.iter_mut().enumerate() {
                        let x = x.offset((i + k).cast_signed() * step).read();
                        *acc = F::push(fold, *acc, x, n * size + i + k);
                    }
                }
            }
            for i in whole..size {
                let acc = &mut accs[i - whole];
                *acc = F::push(fold, *acc, x.offset(i.cast_signed() * step).read(), n * size + i);
            }
        }
    }
    let mut all = accs[0];
    for acc in accs.into_iter().skip(1) {
        all = F::join::<T>(fold, all, acc);
    }
    if !F::is_open::<T>(all) {
        return all;
    }
    // The first element that is 0, of either sign.
    for n in 0..fold.outer.count() {
        let [offset] = fold.outer.at(n);
        for i in 0..size {
            // SAFETY: promised by the caller.
            let x = unsafe { x.offset(offset + i.cast_signed() * step).read() };
            if x.num().is_zero() {
                return F::push(fold, F::start::<T>(fold), x, n * size + i);
            }
        }
    }
    all
}

/// `width` results whose elements lie beside one another.
#[inline(always)]
unsafe fn columns_of<F: Function, T: Element>(
    fold: &Fold,
    x: *const T,
    step: isize,
    width: usize,
    accs: &mut [F::Acc<T>; TILE],
) {
    let Dim { size, strides: [down] } = fold.inner;
    for n in 0..fold.outer.count() {
        let [offset] = fold.outer.at(n);
        for i in 0..size {
            // SAFETY: promised by the caller.
            unsafe {
                let x = x.offset(offset + i.cast_signed() * down);
                if step == 1 && width == TILE {
                    for (k, acc) in accs.iter_mut().enumerate() {
                        *acc = F::push(fold, *acc, x.add(k).read(), n * size + i);
                    }
                } else {
                    for (k, acc) in accs.iter_mut().enumerate().take(width) {
                        *acc = F::push(fold, *acc, x.offset(k.cast_signed() * step).read(), n * size + i);
                    }
                }
            }
        }
    }
}

macro_rules! sums {
    ($($name:ident: $start:ident, $join:ident, |$acc:ident, $x:ident| $push:expr, |$fold:ident, $sum:ident| $finish:expr;)*) => {$(
        struct $name;

        impl Function for $name {
            type Acc<T: Element> = T::Sum;
            #[inline(always)]
            fn start<T: Element>(_: &Fold) -> T::Sum {
                T::Sum::$start
            }
            #[inline(always)]
            fn push<T: Element>(_: &Fold, $acc: T::Sum, x: T, _: usize) -> T::Sum {
                let $x = x.sum();
                $push
            }
            #[inline(always)]
            fn join<T: Element>(_: &Fold, a: T::Sum, b: T::Sum) -> T::Sum {
                a.$join(b)
            }
            #[inline(always)]
            unsafe fn finish<T: Element>($fold: &Fold, $sum: T::Sum, out: *mut u8, _: *mut u8) {
                let sum: T::Sum = $finish;
                // SAFETY: promised by the caller.
                unsafe { sum.write($fold.out.unwrap_or(T::DTYPE), out) };
            }
        }
    )*};
}

sums! {
    Added: ZERO, plus, |acc, x| acc.plus(x), |fold, sum| sum;
    Averaged: NEUTRAL, plus, |acc, x| acc.plus(x), |fold, sum| sum.over(fold.each() as i64);
    Multiplied: ONE, times, |acc, x| acc.times(x), |fold, sum| sum;
    Squared: ZERO, plus, |acc, x| acc.plus(x.times(x)), |fold, sum| sum.root();
}

/// Whether one element is set.
struct Any;
/// Whether all elements are.
struct All;

macro_rules! tests {
    ($($name:ident: $start:literal, $op:tt;)*) => {$(
        impl Function for $name {
            type Acc<T: Element> = bool;
            #[inline(always)]
            fn start<T: Element>(_: &Fold) -> bool {
                $start
            }
            #[inline(always)]
            fn push<T: Element>(_: &Fold, acc: bool, x: T, _: usize) -> bool {
                acc $op !x.num().is_zero()
            }
            #[inline(always)]
            fn join<T: Element>(_: &Fold, a: bool, b: bool) -> bool {
                a $op b
            }
            #[inline(always)]
            unsafe fn finish<T: Element>(_: &Fold, acc: bool, out: *mut u8, _: *mut u8) {
                // SAFETY: promised by the caller: a byte.
                unsafe { out.write(u8::from(acc)) };
            }
        }
    )*};
}

tests! {
    Any: false, |;
    All: true, &;
}

/// Whether `x` comes before `than`: it is NaN, or greater (less).
#[inline(always)]
fn is_better<N: Num, const LARGEST: bool>(x: N, than: N) -> bool {
    (x.is_nan() | (if LARGEST { x > than } else { x < than })) & !than.is_nan()
}

/// An extremum alone.
struct Extreme<const LARGEST: bool>;

impl<const LARGEST: bool> Function for Extreme<LARGEST> {
    type Acc<T: Element> = T::Num;
    #[inline(always)]
    fn start<T: Element>(_: &Fold) -> T::Num {
        if LARGEST { T::Num::LEAST } else { T::Num::GREATEST }
    }
    #[inline(always)]
    fn push<T: Element>(_: &Fold, acc: T::Num, x: T, _: usize) -> T::Num {
        let x = x.num();
        if is_better::<T::Num, LARGEST>(x, acc) { x } else { acc }
    }
    #[inline(always)]
    fn join<T: Element>(_: &Fold, a: T::Num, b: T::Num) -> T::Num {
        if is_better::<T::Num, LARGEST>(b, a) { b } else { a }
    }
    #[inline(always)]
    fn is_open<T: Element>(acc: T::Num) -> bool {
        // 0 and −0 are equal: the first of them counts.
        acc.is_zero()
    }
    #[inline(always)]
    unsafe fn finish<T: Element>(_: &Fold, acc: T::Num, out: *mut u8, _: *mut u8) {
        // SAFETY: promised by the caller.
        unsafe { out.cast::<T>().write(T::of_num(acc)) };
    }
}

/// An extremum and its place.
struct Placed<const LARGEST: bool>;

/// The place of none.
const NONE: usize = usize::MAX;

impl<const LARGEST: bool> Function for Placed<LARGEST> {
    type Acc<T: Element> = (T::Num, usize);
    #[inline(always)]
    fn start<T: Element>(_: &Fold) -> (T::Num, usize) {
        (T::Num::LEAST, NONE)
    }
    #[inline(always)]
    fn push<T: Element>(_: &Fold, acc: (T::Num, usize), x: T, at: usize) -> (T::Num, usize) {
        let x = x.num();
        if acc.1 == NONE || is_better::<T::Num, LARGEST>(x, acc.0) { (x, at) } else { acc }
    }
    #[inline(always)]
    fn join<T: Element>(_: &Fold, a: (T::Num, usize), b: (T::Num, usize)) -> (T::Num, usize) {
        // The earlier one stays unless the later is better.
        let (first, second) = if a.1 <= b.1 { (a, b) } else { (b, a) };
        if second.1 != NONE && is_better::<T::Num, LARGEST>(second.0, first.0) { second } else { first }
    }
    #[inline(always)]
    unsafe fn finish<T: Element>(fold: &Fold, acc: (T::Num, usize), out: *mut u8, place: *mut u8) {
        // SAFETY: promised by the caller.
        unsafe {
            if fold.out.is_some() {
                out.cast::<T>().write(T::of_num(acc.0));
            }
            place.cast::<i64>().write(acc.1 as i64);
        }
    }
}

/// Norms of any order.
struct Powers;

impl Function for Powers {
    type Acc<T: Element> = f64;
    fn start<T: Element>(fold: &Fold) -> f64 {
        if fold.function == FoldFunction::Norm(f64::NEG_INFINITY) { f64::INFINITY } else { 0.0 }
    }
    #[inline(always)]
    fn push<T: Element>(fold: &Fold, acc: f64, x: T, _: usize) -> f64 {
        let FoldFunction::Norm(order) = fold.function else { return acc };
        let x = x.float().abs();
        let power = match order {
            _ if order.is_infinite() => x,
            0.0 => f64::from(u8::from(x != 0.0)),
            1.0 => x,
            _ => float64::pow(x, order),
        };
        taken_in(order, acc, power)
    }
    fn join<T: Element>(fold: &Fold, a: f64, b: f64) -> f64 {
        if let FoldFunction::Norm(order) = fold.function { taken_in(order, a, b) } else { a }
    }
    unsafe fn finish<T: Element>(fold: &Fold, acc: f64, out: *mut u8, _: *mut u8) {
        let FoldFunction::Norm(order) = fold.function else { return };
        let norm =
            if order == 0.0 || order == 1.0 || order.is_infinite() { acc } else { float64::pow(acc, 1.0 / order) };
        // SAFETY: promised by the caller.
        unsafe { norm.write(fold.out.unwrap_or(T::DTYPE), out) };
    }
}

/// A sum of powers, or the extremum of two absolute numbers.
#[inline(always)]
fn taken_in(order: f64, acc: f64, x: f64) -> f64 {
    if order.is_infinite() {
        let is_worse = if order > 0.0 { x > acc } else { x < acc };
        return if acc.is_nan() || !(x.is_nan() || is_worse) { acc } else { x };
    }
    acc + x
}
