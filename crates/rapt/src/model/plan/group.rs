//! Groups: pointwise operations of one shape that become one loop, or the end of a product.

use rapt_core::DType;
use rapt_cpu::pointwise::{Binary, Instruction, Lane, Number, Register, Unary};
use rapt_graph::ops::{self, Emitter, Look};
use rapt_graph::{OpError, ValueId};

use super::place::{Place, Places};
use super::product::Head;

/// The most instructions of a group: the registers of a tile are to stay in the first cache.
const LONGEST: usize = 64;

/// What a group makes: the tensor that it belongs to, and where it is stored.
#[derive(Clone, Debug)]
pub(super) struct Made {
    /// The value whose storage it lies in.
    pub(super) root: ValueId,
    /// Where.
    pub(super) place: Place,
    /// The element.
    pub(super) register: Register,
}

/// Pointwise operations over one shape. Groups that are open at the same time do not need one another.
#[derive(Clone, Debug)]
pub(super) struct Group {
    /// The sizes of the loop.
    pub(super) shape: Vec<i64>,
    /// The product whose sums are operand 0.
    pub(super) head: Option<Head>,
    /// What it reads, in the loop's shape.
    pub(super) reads: Vec<(Place, Register)>,
    /// The code, without stores.
    pub(super) code: Vec<Instruction>,
    /// What it makes.
    pub(super) made: Vec<Made>,
    /// The nodes that it computes.
    pub(super) nodes: Vec<usize>,
    /// Whether an operation may fail: integers are divided.
    pub(super) divides: bool,
}

impl Group {
    pub(super) fn new(shape: Vec<i64>) -> Group {
        let (reads, code, made, nodes) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Group { shape, head: None, reads, code, made, nodes, divides: false }
    }

    pub(super) fn makes(&self, buffer: usize) -> bool {
        self.made.iter().any(|made| made.place.buffer == buffer)
    }

    pub(super) fn touches(&self, buffer: usize) -> bool {
        let of_head = self.head.as_ref().is_some_and(|head| head.reads(buffer));
        of_head || self.makes(buffer) || self.reads.iter().any(|(place, _)| place.buffer == buffer)
    }

    /// Takes in another group of the same shape. Not both have a product, and beside one nothing may fail.
    pub(super) fn absorb(&mut self, other: Group) -> bool {
        if self.shape != other.shape
            || (self.head.is_some() && other.head.is_some())
            || ((self.head.is_some() || other.head.is_some()) && (self.divides || other.divides))
            || self.code.len() + other.code.len() > LONGEST
        {
            return false;
        }
        // The sums of a product are register 0.
        let (mut first, second) = if other.head.is_some() { (other, self.clone()) } else { (self.clone(), other) };
        let shift = u16::try_from(first.code.len()).unwrap_or(u16::MAX);
        let moved = |register: Register| Register(register.0 + shift);
        let operands = first.operands();
        first.code.extend(second.code.iter().map(|&instruction| match instruction {
            Instruction::Load(operand) => Instruction::Load(operand + operands),
            Instruction::Number(number) => Instruction::Number(number),
            Instruction::Unary(op, x) => Instruction::Unary(op, moved(x)),
            Instruction::Binary(op, a, b) => Instruction::Binary(op, moved(a), moved(b)),
            Instruction::Select(c, a, b) => Instruction::Select(moved(c), moved(a), moved(b)),
            Instruction::MulAdd(a, b, c) => Instruction::MulAdd(moved(a), moved(b), moved(c)),
            Instruction::Convert(x, dtype) => Instruction::Convert(moved(x), dtype),
            Instruction::Store(operand, x) => Instruction::Store(operand + operands, moved(x)),
        }));
        first.reads.extend(second.reads.into_iter().map(|(place, register)| (place, moved(register))));
        let made = second.made.into_iter().map(|made| Made { register: moved(made.register), ..made });
        first.made.extend(made);
        first.nodes.extend(second.nodes);
        first.divides |= second.divides;
        *self = first;
        true
    }

    /// The number of operands before the stores.
    pub(super) fn operands(&self) -> usize {
        self.reads.len() + usize::from(self.head.is_some())
    }

    fn push(&mut self, instruction: Instruction) -> Register {
        self.code.push(instruction);
        Register(u16::try_from(self.code.len() - 1).unwrap_or(u16::MAX))
    }

    /// Adds the code of a node whose result has this shape and dtype; `None`, and nothing is added, where the group cannot
    /// hold it.
    pub(super) fn extend(
        &mut self,
        places: &Places<'_>,
        shape: &[i64],
        write: impl FnOnce(&mut Writer<'_>) -> Result<Register, OpError>,
    ) -> Option<Register> {
        let (code, reads, divides) = (self.code.len(), self.reads.len(), self.divides);
        let mut writer = Writer { group: self, places, shape, fits: true };
        let register = write(&mut writer).ok().filter(|_| writer.fits);
        // What runs on a product's tiles cannot fail.
        let fails = self.head.is_some() && self.divides;
        if register.is_none() || fails || self.code.len() > LONGEST {
            self.code.truncate(code);
            self.reads.truncate(reads);
            self.divides = divides;
            return None;
        }
        register
    }
}

/// Writes the code of one node into a group.
pub(super) struct Writer<'a> {
    group: &'a mut Group,
    places: &'a Places<'a>,
    /// The shape of the node's result: as many elements as the group's.
    shape: &'a [i64],
    fits: bool,
}

impl Writer<'_> {
    /// The element at a place.
    pub(super) fn place(&mut self, place: &Place) -> Register {
        let Some(place) = place.broadcast(self.shape).reshaped(&self.group.shape) else {
            self.fits = false;
            return Register(0);
        };
        if let Some(made) = self.group.made.iter().find(|made| made.place.is(&place)) {
            return made.register;
        }
        if self.group.makes(place.buffer) {
            // Made by this group, and read in another order.
            self.fits = false;
            return Register(0);
        }
        if let Some((_, register)) = self.group.reads.iter().find(|(known, _)| known.is(&place)) {
            return *register;
        }
        let operand = self.group.operands();
        let register = self.group.push(Instruction::Load(operand));
        self.group.reads.push((place, register));
        register
    }

    /// In the lane of a dtype, rounded or wrapped to it.
    pub(super) fn in_dtype(&mut self, x: Register, dtype: DType) -> Register {
        self.group.push(Instruction::Convert(x, dtype))
    }

    /// A function of two registers of one lane.
    pub(super) fn both(&mut self, op: Binary, a: Register, b: Register) -> Register {
        self.group.push(Instruction::Binary(op, a, b))
    }
}

impl Emitter for Writer<'_> {
    type Value = Register;

    fn tensor(&mut self, id: ValueId) -> Register {
        match self.places.of(id) {
            Some(place) => self.place(&place),
            None => {
                self.fits = false;
                Register(0)
            }
        }
    }

    fn seen(&mut self, id: ValueId, look: Look) -> Register {
        let place = self.places.of(id);
        let seen = place.and_then(|place| Some(Place { meta: look.of(&place.meta).ok()?, ..place }));
        match seen {
            Some(place) => self.place(&place),
            None => {
                self.fits = false;
                Register(0)
            }
        }
    }

    fn float(&mut self, dtype: DType, x: f64) -> Register {
        let number = if dtype == DType::F64 { Number::F64(x) } else { Number::F32(x as f32) };
        self.group.push(Instruction::Number(number))
    }

    fn int(&mut self, dtype: DType, n: i64) -> Register {
        let number = if dtype == DType::Bool { Number::Bool(n != 0) } else { Number::Int(n) };
        self.group.push(Instruction::Number(number))
    }

    fn convert(&mut self, x: Register, from: DType, to: DType) -> Register {
        // PyTorch converts integers to the narrow floats by way of float32.
        let narrow = matches!(to, DType::F16 | DType::BF16);
        let x = if narrow && Lane::of(from) == Some(Lane::Int) { self.in_dtype(x, DType::F32) } else { x };
        self.in_dtype(x, to)
    }

    fn unary(&mut self, op: ops::Unary, x: Register, (compute, result): (DType, DType)) -> Register {
        let of_bools = compute == DType::Bool;
        let keeps = matches!(op, ops::Unary::LogicalNot | ops::Unary::BitwiseNot);
        let x = if of_bools && !keeps { self.in_dtype(x, DType::I64) } else { x };
        let y = self.group.push(Instruction::Unary(unary(op), x));
        self.in_dtype(y, result)
    }

    fn binary(&mut self, op: ops::Binary, [a, b]: [Register; 2], (compute, result): (DType, DType)) -> Register {
        use ops::Binary::{DivFloor, DivTrunc, Fmod, Remainder};
        self.group.divides |=
            matches!(op, DivFloor | DivTrunc | Remainder | Fmod) && Lane::of(compute) == Some(Lane::Int);
        // Arithmetic on booleans is one on integers; what is not 0 is true.
        let [a, b] = if compute == DType::Bool { [a, b].map(|x| self.in_dtype(x, DType::I64)) } else { [a, b] };
        let y = self.both(binary(op), a, b);
        self.in_dtype(y, result)
    }

    fn mul_add(&mut self, [a, b, c]: [Register; 3], dtype: DType) -> Register {
        let y = self.group.push(Instruction::MulAdd(a, b, c));
        self.in_dtype(y, dtype)
    }

    fn select(&mut self, condition: Register, [a, b]: [Register; 2], _: DType) -> Register {
        self.group.push(Instruction::Select(condition, a, b))
    }
}

macro_rules! same_names {
    ($function:ident: $from:ty => $to:ty; $($name:ident)*) => {
        /// The kernels' function of the graph's.
        fn $function(op: $from) -> $to {
            match op { $( <$from>::$name => <$to>::$name, )* }
        }
    };
}

same_names! { unary: ops::Unary => Unary;
    Neg Abs Sign Square Relu Floor Ceil Trunc Round Exp Exp2 Expm1 Log Log2 Log10 Log1p Sin Cos Tan Tanh Sinh Cosh Asin
    Acos Atan Asinh Acosh Atanh Erf Erfc Sigmoid Sqrt Rsqrt Reciprocal Silu Gelu GeluTanh LogicalNot BitwiseNot IsNan IsInf
}

same_names! { binary: ops::Binary => Binary;
    Add Sub Mul Div DivFloor DivTrunc Remainder Fmod Pow Maximum Minimum Eq Ne Lt Le Gt Ge BitwiseAnd BitwiseOr BitwiseXor
    LogicalAnd LogicalOr LogicalXor Atan2 Hypot Copysign ShiftLeft ShiftRight
}
