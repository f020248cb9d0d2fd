//! Tile programs: chains of pointwise functions over strided and broadcast tensors, fused.
//!
//! ```text
//! Program::new(operands, code)         the instructions, checked: every register before its use, every lane right
//! Loop::new(arch, program, shape, …)   dimensions merged and ordered, registers given places            once per shape
//! run_item(item, items, pointers, …)   tile by tile: each instruction is one loop over some hundred elements in L1
//! ```
//! A register holds one element of the shape; instruction number `n` defines register `n`. A tile of a register is an array in
//! scratch memory, or the operand's own memory where that is as the loop needs it.
//!
//! ```
//! use std::sync::Arc;
//! use rapt_core::DType;
//! use rapt_cpu::pointwise::{Binary, Instruction, Loop, Program, Register, Unary};
//!
//! // out = gelu(x + bias), x: [2, 3] in bfloat16, bias: [3] in float32; the sum is rounded to bfloat16.
//! let code = vec![
//!     Instruction::Load(0),
//!     Instruction::Load(1),
//!     Instruction::Binary(Binary::Add, Register(0), Register(1)),
//!     Instruction::Convert(Register(2), DType::BF16),
//!     Instruction::Unary(Unary::Gelu, Register(3)),
//!     Instruction::Store(2, Register(4)),
//! ];
//! let program = Arc::new(Program::new(vec![DType::BF16, DType::F32, DType::BF16], code)?);
//! let arch = *rapt_cpu::available().last().unwrap();
//! let each = Loop::new(arch, program, &[2, 3], &[vec![3, 1], vec![0, 1], vec![3, 1]])?;
//!
//! let (x, bias, mut out) = ([0x3F80u16; 6], [1.0f32, 2.0, -9.0], [0u16; 6]);
//! let mut scratch = vec![0u64; each.scratch_bytes() / 8];
//! let pointers = [x.as_ptr() as *mut u8, bias.as_ptr() as *mut u8, out.as_mut_ptr().cast()];
//! let items = each.items(1);
//! for item in 0..items {
//!     // SAFETY: the operands have the elements of shape and strides, and the scratch memory its length.
//!     unsafe { each.run_item(item, items, &pointers, scratch.as_mut_ptr().cast())? };
//! }
//! assert_eq!(out[..2], [0x3FFA, 0x4040]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//! Functions have the semantics of rapt-graph's interpreter, element by element. What depends on a dtype narrower than its lane
//! is said by [`Instruction::Convert`]: after each node of a graph whose dtype is float16, bfloat16 or an integer narrower than
//! int64. Deliberately absent: promotion, shapes of results, allocation while running, threads.

pub(crate) mod kernels;
mod nest;
mod program;
mod run;
mod steps;

pub use program::{Program, ProgramError};
pub(crate) use run::share;
pub use run::{Loop, ZeroDivision};

use rapt_core::DType;

/// What a register holds of each element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// float32; also the lane of float16 and bfloat16.
    F32,
    /// float64.
    F64,
    /// int64; also the lane of all other integers.
    Int,
    /// 0 or 1 in a byte.
    Bool,
}

impl Lane {
    /// The lane of a dtype's elements, where programs take that dtype.
    #[must_use]
    pub fn of(dtype: DType) -> Option<Lane> {
        Some(match dtype {
            DType::F16 | DType::BF16 | DType::F32 => Lane::F32,
            DType::F64 => Lane::F64,
            DType::U8 | DType::I8 | DType::I16 | DType::I32 | DType::I64 => Lane::Int,
            DType::Bool => Lane::Bool,
            _ => return None,
        })
    }

    /// The bytes of one element.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Lane::F32 => 4,
            Lane::F64 | Lane::Int => 8,
            Lane::Bool => 1,
        }
    }
}

/// The result of the instruction with this number, counted from 0. A store has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Register(pub u16);

/// A constant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// In [`Lane::F32`].
    F32(f32),
    /// In [`Lane::F64`].
    F64(f64),
    /// In [`Lane::Int`].
    Int(i64),
    /// In [`Lane::Bool`].
    Bool(bool),
}

/// One instruction of a program.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Instruction {
    /// The elements of an operand, in the lane of its dtype. A boolean's byte other than 0 is 1.
    Load(usize),
    /// A constant.
    Number(Number),
    /// A function of one register.
    Unary(Unary, Register),
    /// A function of two registers of one lane.
    Binary(Binary, Register, Register),
    /// The second where the first, which is of [`Lane::Bool`], is 1, else the third.
    Select(Register, Register, Register),
    /// `a · b + c` with one rounding; of integers it wraps.
    MulAdd(Register, Register, Register),
    /// The numbers in a dtype, kept in the lane of that dtype: floats rounded to nearest even, integers wrapped, booleans
    /// whether a number is other than 0, and floats to integers as PyTorch does on x86 (truncated; outside of the dtype the
    /// least int32 or int64, wrapped). Where a register is known to hold the dtype's numbers it does nothing.
    Convert(Register, DType),
    /// Writes a register to an operand, converted to its dtype as [`Instruction::Convert`] does.
    Store(usize, Register),
}

/// A function of one register, with ATen's semantics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "ATen's names, which ATen documents")]
pub enum Unary {
    Neg,
    Abs,
    Sign,
    Square,
    Relu,
    Floor,
    Ceil,
    Trunc,
    Round,
    Exp,
    Exp2,
    Expm1,
    Log,
    Log2,
    Log10,
    Log1p,
    Sin,
    Cos,
    Tan,
    Tanh,
    Sinh,
    Cosh,
    Asin,
    Acos,
    Atan,
    Asinh,
    Acosh,
    Atanh,
    Erf,
    Erfc,
    Sigmoid,
    Sqrt,
    Rsqrt,
    Reciprocal,
    Silu,
    /// `gelu` with `approximate` none.
    Gelu,
    /// `gelu` with `approximate` tanh.
    GeluTanh,
    /// Gives [`Lane::Bool`].
    LogicalNot,
    /// Of integers and booleans.
    BitwiseNot,
    /// Gives [`Lane::Bool`].
    IsNan,
    /// Gives [`Lane::Bool`].
    IsInf,
}

impl Unary {
    /// Every function.
    pub const ALL: [Unary; 41] = {
        use Unary::{
            Abs, Acos, Acosh, Asin, Asinh, Atan, Atanh, BitwiseNot, Ceil, Cos, Cosh, Erf, Erfc, Exp, Exp2, Expm1,
            Floor, Gelu, GeluTanh, IsInf, IsNan, Log, Log1p, Log2, Log10, LogicalNot, Neg, Reciprocal, Relu, Round,
            Rsqrt, Sigmoid, Sign, Silu, Sin, Sinh, Sqrt, Square, Tan, Tanh, Trunc,
        };
        [
            Neg, Abs, Sign, Square, Relu, Floor, Ceil, Trunc, Round, Exp, Exp2, Expm1, Log, Log2, Log10, Log1p, Sin,
            Cos, Tan, Tanh, Sinh, Cosh, Asin, Acos, Atan, Asinh, Acosh, Atanh, Erf, Erfc, Sigmoid, Sqrt, Rsqrt,
            Reciprocal, Silu, Gelu, GeluTanh, LogicalNot, BitwiseNot, IsNan, IsInf,
        ]
    };

    /// The lane of its result of a lane, where it is defined there. Rounding functions leave integers as they are.
    #[must_use]
    pub fn result(self, lane: Lane) -> Option<Lane> {
        let is_defined = match lane {
            Lane::F32 | Lane::F64 => self != Unary::BitwiseNot,
            Lane::Int => {
                use Unary::{
                    Abs, BitwiseNot, Ceil, Floor, IsInf, IsNan, LogicalNot, Neg, Relu, Round, Sign, Square, Trunc,
                };
                matches!(
                    self,
                    Neg | Abs
                        | Sign
                        | Square
                        | Relu
                        | Floor
                        | Ceil
                        | Trunc
                        | Round
                        | LogicalNot
                        | BitwiseNot
                        | IsNan
                        | IsInf
                )
            }
            Lane::Bool => {
                use Unary::{BitwiseNot, IsInf, IsNan, LogicalNot, Sign, Square};
                matches!(self, Sign | Square | LogicalNot | BitwiseNot | IsNan | IsInf)
            }
        };
        let tests = matches!(self, Unary::LogicalNot | Unary::IsNan | Unary::IsInf);
        is_defined.then_some(if tests { Lane::Bool } else { lane })
    }
}

/// A function of two registers, with ATen's semantics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "ATen's names, which ATen documents")]
pub enum Binary {
    Add,
    Sub,
    Mul,
    /// The true quotient, of floats.
    Div,
    /// `div` with `rounding_mode` floor, `floor_divide`.
    DivFloor,
    /// `div` with `rounding_mode` trunc.
    DivTrunc,
    /// With the divisor's sign.
    Remainder,
    /// With the dividend's sign.
    Fmod,
    Pow,
    Maximum,
    Minimum,
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    BitwiseAnd,
    BitwiseOr,
    BitwiseXor,
    LogicalAnd,
    LogicalOr,
    LogicalXor,
    /// The angle of the point (second, first), of floats.
    Atan2,
    /// `√(a² + b²)`, of floats.
    Hypot,
    /// The first with the sign of the second, of floats.
    Copysign,
    /// By as many bits as the second says, of integers; beyond 64 it is 0.
    ShiftLeft,
    /// The same to the right; the sign fills.
    ShiftRight,
}

impl Binary {
    /// Every function.
    pub const ALL: [Binary; 28] = {
        use Binary::{
            Add, Atan2, BitwiseAnd, BitwiseOr, BitwiseXor, Copysign, Div, DivFloor, DivTrunc, Eq, Fmod, Ge, Gt, Hypot,
            Le, LogicalAnd, LogicalOr, LogicalXor, Lt, Maximum, Minimum, Mul, Ne, Pow, Remainder, ShiftLeft,
            ShiftRight, Sub,
        };
        [
            Add, Sub, Mul, Div, DivFloor, DivTrunc, Remainder, Fmod, Pow, Maximum, Minimum, Eq, Ne, Lt, Le, Gt, Ge,
            BitwiseAnd, BitwiseOr, BitwiseXor, LogicalAnd, LogicalOr, LogicalXor, Atan2, Hypot, Copysign, ShiftLeft,
            ShiftRight,
        ]
    };

    /// The lane of its result of two registers of a lane, where it is defined there: comparisons and logical functions give
    /// [`Lane::Bool`], the others the lane itself. Sums and products of booleans are whether they are other than 0.
    #[must_use]
    pub fn result(self, lane: Lane) -> Option<Lane> {
        use Binary::{
            Atan2, BitwiseAnd, BitwiseOr, BitwiseXor, Copysign, Div, DivFloor, DivTrunc, Eq, Fmod, Ge, Gt, Hypot, Le,
            LogicalAnd, LogicalOr, LogicalXor, Lt, Ne, Remainder, ShiftLeft, ShiftRight, Sub,
        };
        let is_shift = matches!(self, ShiftLeft | ShiftRight);
        let is_bitwise = matches!(self, BitwiseAnd | BitwiseOr | BitwiseXor);
        let of_floats = matches!(self, Div | Atan2 | Hypot | Copysign);
        let is_defined = match lane {
            Lane::F32 | Lane::F64 => !is_bitwise && !is_shift,
            Lane::Int => !of_floats,
            Lane::Bool => !of_floats && !is_shift && !matches!(self, Sub | DivFloor | DivTrunc | Remainder | Fmod),
        };
        let tests = matches!(self, Eq | Ne | Lt | Le | Gt | Ge | LogicalAnd | LogicalOr | LogicalXor);
        is_defined.then_some(if tests { Lane::Bool } else { lane })
    }
}
