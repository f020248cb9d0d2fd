//! The loops of instructions: one function per instruction, lane and instruction set, each a plain loop over a tile that the
//! compiler turns into vectors inside a [`Part`].
//!
//! An element's value does not depend on where in a tile it stands: vectors and the loop's rest round alike.

mod binary;
mod convert;
pub(crate) mod math;
mod moves;
mod unary;

use rapt_core::DType;

use super::{Binary, Lane, Unary};
use crate::arch::{self, Vectors};
use crate::kernels::simd::{Part, Simd};

/// The loop of one instruction: the first array becomes the function of the others, `n` elements of each. Whether an integer
/// was divided by 0. The pointers are arguments of their own because those of an array go by way of memory, where the loop
/// would wait for them.
pub(super) type Kernel = unsafe fn(*mut u8, *const u8, *const u8, *const u8, usize) -> bool;

/// Moves a rectangle of elements between a dense array and an operand: dense array, operand, rectangle.
pub(super) type Move = unsafe fn(*mut u8, *mut u8, &Rectangle);

/// Copies a rectangle of elements: to, from, each with its strides.
pub(super) type Copy = unsafe fn(*mut u8, *const u8, &Rectangle, &Rectangle);

/// Asks for the cache lines of so many bytes.
pub(super) type Ask = unsafe fn(*const u8, usize);

pub(super) use math::is_costly;

/// Rows and columns of elements, and how many elements lie from one to the next.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rectangle {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) row_stride: isize,
    pub(super) column_stride: isize,
}

/// What an instruction computes, as far as its loop is concerned.
#[derive(Clone, std::marker::Copy, Debug)]
pub(super) enum Function {
    Unary(Unary, Lane),
    /// A function of float32 whose result is rounded to 16 bits at once, to the digits that this keeps.
    ShortUnary(Unary),
    Binary(Binary, Lane),
    Select(Lane),
    MulAdd(Lane),
    Convert(Lane, DType),
}

struct Find<K>(K);

impl Vectors for Find<Function> {
    type Output = Option<Kernel>;
    fn visit<S: Simd<Elem = f32>, D: Simd<Elem = f64>>(self) -> Option<Kernel> {
        match self.0 {
            Function::Unary(op, lane) => unary::kernel::<S>(op, lane),
            Function::ShortUnary(op) => unary::short::<S>(op),
            Function::Binary(op, lane) => binary::kernel::<S>(op, lane),
            Function::Select(lane) => Some(binary::select::<S>(lane)),
            Function::MulAdd(lane) => binary::mul_add::<S>(lane),
            Function::Convert(lane, dtype) => convert::kernel::<S>(lane, dtype),
        }
    }
}

/// The loop of a function; `None` where it is not defined on its lane.
pub(super) fn kernel(arch: rapt_core::Arch, function: Function) -> Option<Kernel> {
    arch::with_vectors(arch, Find(function))
}

struct Loads(DType);

impl Vectors for Loads {
    type Output = Option<(Move, Move)>;
    fn visit<S: Simd<Elem = f32>, D: Simd<Elem = f64>>(self) -> Option<(Move, Move)> {
        moves::pair::<S>(self.0)
    }
}

/// What loads elements of a dtype to a dense array of its lane, and what stores them.
pub(super) fn moves(arch: rapt_core::Arch, dtype: DType) -> Option<(Move, Move)> {
    arch::with_vectors(arch, Loads(dtype))
}

struct Copies(usize);

impl Vectors for Copies {
    type Output = Copy;
    fn visit<S: Simd<Elem = f32>, D: Simd<Elem = f64>>(self) -> Copy {
        moves::copy::<S, D>(self.0)
    }
}

/// What copies elements of this many bytes.
pub(super) fn copy(arch: rapt_core::Arch, bytes: usize) -> Copy {
    arch::with_vectors(arch, Copies(bytes))
}

struct Asks;

impl Vectors for Asks {
    type Output = Ask;
    fn visit<S: Simd<Elem = f32>, D: Simd<Elem = f64>>(self) -> Ask {
        moves::ask::<S>
    }
}

/// What asks for cache lines.
pub(super) fn ask(arch: rapt_core::Arch) -> Ask {
    arch::with_vectors(arch, Asks)
}

/// A function of one element.
trait Map {
    type In: std::marker::Copy;
    type Out;
    fn of<S: Simd<Elem = f32>>(x: Self::In) -> Self::Out;
}

/// A function of two elements.
trait Map2 {
    type In: std::marker::Copy;
    type Out;
    fn of<S: Simd<Elem = f32>>(a: Self::In, b: Self::In) -> Self::Out;
}

/// A function of three elements.
trait Map3 {
    type A: std::marker::Copy;
    type B: std::marker::Copy;
    fn of<S: Simd<Elem = f32>>(a: Self::A, b: Self::B, c: Self::B) -> Self::B;
}

struct Each<F> {
    dst: *mut u8,
    sources: [*const u8; 3],
    n: usize,
    of: std::marker::PhantomData<F>,
}

impl<F> Each<F> {
    #[inline(always)]
    fn new(dst: *mut u8, sources: [*const u8; 3], n: usize) -> Self {
        Each { dst, sources, n, of: std::marker::PhantomData }
    }
}

/// The same over one source, two or three, by what `F` is.
struct One<F>(Each<F>);
struct Two<F>(Each<F>);
struct Three<F>(Each<F>);

impl<S: Simd<Elem = f32>, F: Map> Part<S> for One<F> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let (dst, a) = (self.0.dst.cast::<F::Out>(), self.0.sources[0].cast::<F::In>());
        for i in 0..self.0.n {
            // SAFETY: the caller vouches for n elements of each array.
            unsafe { dst.add(i).write(F::of::<S>(a.add(i).read())) };
        }
    }
}

impl<S: Simd<Elem = f32>, F: Map2> Part<S> for Two<F> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let dst = self.0.dst.cast::<F::Out>();
        let (a, b) = (self.0.sources[0].cast::<F::In>(), self.0.sources[1].cast::<F::In>());
        for i in 0..self.0.n {
            // SAFETY: the caller vouches for n elements of each array.
            unsafe { dst.add(i).write(F::of::<S>(a.add(i).read(), b.add(i).read())) };
        }
    }
}

impl<S: Simd<Elem = f32>, F: Map3> Part<S> for Three<F> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let (dst, a) = (self.0.dst.cast::<F::B>(), self.0.sources[0].cast::<F::A>());
        let (b, c) = (self.0.sources[1].cast::<F::B>(), self.0.sources[2].cast::<F::B>());
        for i in 0..self.0.n {
            // SAFETY: the caller vouches for n elements of each array.
            unsafe { dst.add(i).write(F::of::<S>(a.add(i).read(), b.add(i).read(), c.add(i).read())) };
        }
    }
}

unsafe fn one<S: Simd<Elem = f32>, F: Map>(dst: *mut u8, a: *const u8, b: *const u8, c: *const u8, n: usize) -> bool {
    // SAFETY: promised by the caller.
    unsafe { S::apart(One(Each::<F>::new(dst, [a, b, c], n))) };
    false
}

unsafe fn two<S: Simd<Elem = f32>, F: Map2>(dst: *mut u8, a: *const u8, b: *const u8, c: *const u8, n: usize) -> bool {
    // SAFETY: promised by the caller.
    unsafe { S::apart(Two(Each::<F>::new(dst, [a, b, c], n))) };
    false
}

unsafe fn three<S: Simd<Elem = f32>, F: Map3>(
    dst: *mut u8,
    a: *const u8,
    b: *const u8,
    c: *const u8,
    n: usize,
) -> bool {
    // SAFETY: promised by the caller.
    unsafe { S::apart(Three(Each::<F>::new(dst, [a, b, c], n))) };
    false
}

/// The loop of a function of one element, written as a closure; `S` is the instruction set there.
macro_rules! each {
    ($in:ty => $out:ty, |$x:ident| $of:expr) => {{
        struct Of;
        impl super::Map for Of {
            type In = $in;
            type Out = $out;
            #[inline(always)]
            #[allow(clippy::extra_unused_type_parameters, reason = "not every function asks")]
            fn of<S: crate::kernels::simd::Simd<Elem = f32>>($x: $in) -> $out {
                $of
            }
        }
        super::one::<S, Of> as super::Kernel
    }};
    ($in:ty => $out:ty, |$a:ident, $b:ident| $of:expr) => {{
        struct Of;
        impl super::Map2 for Of {
            type In = $in;
            type Out = $out;
            #[inline(always)]
            #[allow(clippy::extra_unused_type_parameters, reason = "not every function asks")]
            fn of<S: crate::kernels::simd::Simd<Elem = f32>>($a: $in, $b: $in) -> $out {
                $of
            }
        }
        super::two::<S, Of> as super::Kernel
    }};
    ($first:ty, $rest:ty, |$a:ident, $b:ident, $c:ident| $of:expr) => {{
        struct Of;
        impl super::Map3 for Of {
            type A = $first;
            type B = $rest;
            #[inline(always)]
            #[allow(clippy::extra_unused_type_parameters, reason = "not every function asks")]
            fn of<S: crate::kernels::simd::Simd<Elem = f32>>($a: $first, $b: $rest, $c: $rest) -> $rest {
                $of
            }
        }
        super::three::<S, Of> as super::Kernel
    }};
}
use each;
