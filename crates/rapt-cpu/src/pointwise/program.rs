//! A program: its instructions, checked once.

use std::fmt;

use rapt_core::{Arch, DType};

use super::{Instruction, Lane, Number, Register};

/// Instructions over operands, checked: registers are defined before they are used, lanes fit.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    operands: Vec<DType>,
    code: Vec<Instruction>,
    lanes: Vec<Option<Lane>>,
}

/// The longest program: with a conversion before each store, its registers can still be numbered.
const MOST_INSTRUCTIONS: usize = 16_384;

/// Why instructions are no program, or a program fits no loop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProgramError {
    /// An operand's dtype has no lane.
    Dtype {
        /// The operand, or the instruction that converts.
        at: usize,
        /// The dtype.
        dtype: DType,
    },
    /// An instruction speaks of an operand that is not there.
    Operand {
        /// The instruction.
        at: usize,
        /// The operand.
        operand: usize,
    },
    /// An operand is stored to twice.
    StoredTwice {
        /// The operand.
        operand: usize,
    },
    /// An instruction reads a register that no instruction before it defines.
    Undefined {
        /// The instruction.
        at: usize,
        /// The register.
        register: Register,
    },
    /// An instruction's function is not defined on its operands' lanes.
    Lanes {
        /// The instruction.
        at: usize,
        /// The lanes of its operands.
        lanes: Vec<Lane>,
    },
    /// More instructions than registers can be numbered.
    Length {
        /// How many.
        instructions: usize,
    },
    /// As many lists of strides as operands, and as many strides as dimensions, are needed.
    Strides {
        /// How many are needed.
        expected: usize,
        /// How many there are.
        got: usize,
    },
    /// The elements of a shape, or the bytes between two of them, are more than addresses can count.
    TooLarge,
    /// This machine or build lacks the instruction set.
    Missing {
        /// The instruction set.
        arch: Arch,
    },
}

impl fmt::Display for ProgramError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ProgramError::Dtype { at, dtype } => {
                write!(f, "operand or instruction {at} is of {dtype}, which no program takes")
            }
            ProgramError::Operand { at, operand } => {
                write!(f, "instruction {at} speaks of operand {operand}, which is not there")
            }
            ProgramError::StoredTwice { operand } => write!(f, "operand {operand} is stored to twice"),
            ProgramError::Undefined { at, register } => {
                write!(f, "instruction {at} reads register {}, which nothing before it defines", register.0)
            }
            ProgramError::Lanes { at, lanes } => write!(f, "instruction {at} is not defined on {lanes:?}"),
            ProgramError::Length { instructions } => {
                write!(f, "{instructions} instructions; at most {MOST_INSTRUCTIONS}")
            }
            ProgramError::Strides { expected, got } => write!(f, "{got} strides or lists of them, expected {expected}"),
            ProgramError::TooLarge => f.write_str("the shape has more elements than addresses can count"),
            ProgramError::Missing { arch } => write!(f, "{}: this machine or build lacks it", arch.name()),
        }
    }
}

impl std::error::Error for ProgramError {}

impl Program {
    /// Checks the instructions. `operands` are the dtypes of the tensors that they load and store.
    ///
    /// # Errors
    /// [`ProgramError::Dtype`], [`Operand`](ProgramError::Operand), [`Undefined`](ProgramError::Undefined),
    /// [`Lanes`](ProgramError::Lanes), [`StoredTwice`](ProgramError::StoredTwice) and [`Length`](ProgramError::Length), each with
    /// the offender.
    pub fn new(operands: Vec<DType>, code: Vec<Instruction>) -> Result<Program, ProgramError> {
        if code.len() > MOST_INSTRUCTIONS {
            return Err(ProgramError::Length { instructions: code.len() });
        }
        if let Some((at, &dtype)) = operands.iter().enumerate().find(|(_, dtype)| Lane::of(**dtype).is_none()) {
            return Err(ProgramError::Dtype { at, dtype });
        }
        let mut lanes = Vec::with_capacity(code.len());
        for (at, instruction) in code.iter().enumerate() {
            lanes.push(result(at, *instruction, &operands, &lanes)?);
            if let Instruction::Store(operand, _) = *instruction {
                let is_store = |before: &Instruction| matches!(before, Instruction::Store(to, _) if *to == operand);
                if code[..at].iter().any(is_store) {
                    return Err(ProgramError::StoredTwice { operand });
                }
            }
        }
        Ok(Program { operands, code, lanes })
    }

    /// The dtypes of the operands.
    #[must_use]
    pub fn operands(&self) -> &[DType] {
        &self.operands
    }

    /// The instructions.
    #[must_use]
    pub fn code(&self) -> &[Instruction] {
        &self.code
    }

    /// The lane of a register, if an instruction defines it.
    #[must_use]
    pub fn lane(&self, register: Register) -> Option<Lane> {
        self.lanes.get(usize::from(register.0)).copied().flatten()
    }

    /// The operands of a program that loads one and stores it to another of the same dtype, and does nothing else.
    pub(super) fn copy(&self) -> Option<(usize, usize)> {
        match self.code[..] {
            [Instruction::Load(from), Instruction::Store(to, Register(0))] => {
                (self.operands[from] == self.operands[to]).then_some((from, to))
            }
            _ => None,
        }
    }
}

/// The registers that an instruction reads.
pub(super) fn reads(instruction: Instruction) -> impl Iterator<Item = Register> {
    let registers = match instruction {
        Instruction::Load(_) | Instruction::Number(_) => [None; 3],
        Instruction::Unary(_, a) | Instruction::Convert(a, _) | Instruction::Store(_, a) => [Some(a), None, None],
        Instruction::Binary(_, a, b) => [Some(a), Some(b), None],
        Instruction::Select(a, b, c) | Instruction::MulAdd(a, b, c) => [Some(a), Some(b), Some(c)],
    };
    registers.into_iter().flatten()
}

/// The lane of an instruction's result; a store has none.
fn result(
    at: usize,
    instruction: Instruction,
    operands: &[DType],
    before: &[Option<Lane>],
) -> Result<Option<Lane>, ProgramError> {
    let operand = |operand: usize| operands.get(operand).copied().ok_or(ProgramError::Operand { at, operand });
    let lanes = reads(instruction)
        .map(|register| {
            let lane = before.get(usize::from(register.0)).copied().flatten();
            lane.ok_or(ProgramError::Undefined { at, register })
        })
        .collect::<Result<Vec<Lane>, _>>()?;
    let lane = match instruction {
        Instruction::Load(from) => Lane::of(operand(from)?),
        Instruction::Number(Number::F32(_)) => Some(Lane::F32),
        Instruction::Number(Number::F64(_)) => Some(Lane::F64),
        Instruction::Number(Number::Int(_)) => Some(Lane::Int),
        Instruction::Number(Number::Bool(_)) => Some(Lane::Bool),
        Instruction::Unary(op, _) => op.result(lanes[0]),
        Instruction::Binary(op, ..) if lanes[0] == lanes[1] => op.result(lanes[0]),
        Instruction::Binary(..) => None,
        Instruction::Select(..) => (lanes[0] == Lane::Bool && lanes[1] == lanes[2]).then_some(lanes[1]),
        Instruction::MulAdd(..) => {
            let is_one = lanes.iter().all(|lane| *lane == lanes[0]);
            (is_one && lanes[0] != Lane::Bool).then_some(lanes[0])
        }
        Instruction::Convert(_, dtype) => Some(Lane::of(dtype).ok_or(ProgramError::Dtype { at, dtype })?),
        Instruction::Store(to, _) => {
            operand(to)?;
            return Ok(None);
        }
    };
    lane.map(Some).ok_or(ProgramError::Lanes { at, lanes })
}
