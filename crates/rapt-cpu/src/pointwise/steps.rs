//! A program for one loop: which register lies where, and which function computes it.
//!
//! A register lies in a slot of scratch memory, which others get after its last use. Two kinds lie in no slot: one that is loaded
//! from an operand whose tiles are dense lies in the operand, and one that is stored to an operand whose tiles are dense is
//! computed there. Where a store may change what is still to be loaded (`is_apart` false), only what is read before the first
//! store lies in its operand, and results go to slots first. What is the same in each row keeps its slot.

use rapt_core::{Arch, DType};

use super::kernels::{self, Function, Kernel, Move};
use super::nest::Lies;
use super::program::{Program, reads};
use super::{Binary, Instruction, Lane, Number, Register, Unary};

/// A place: an operand's tile, or a slot after them.
pub(super) type Place = u16;

/// What runs for each tile, in this order.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    /// A function of arrays.
    Compute { kernel: Kernel, to: Place, from: [Place; 3] },
    /// An operand's elements to a slot.
    Load { kernel: Move, to: Place, operand: Place },
    /// A slot's elements to an operand.
    Store { kernel: Move, from: Place, operand: Place },
}

/// The steps of a loop, and its slots.
#[derive(Clone, Debug, Default)]
pub(super) struct Steps {
    /// Constants, and the slot of each.
    pub(super) numbers: Vec<(Place, Number)>,
    /// Loads of what is the same in each row: they run once where a row is one tile.
    pub(super) same: Vec<Step>,
    /// What runs for each tile.
    pub(super) steps: Vec<Step>,
    /// The bytes of an element of each slot.
    pub(super) slots: Vec<usize>,
}

/// An instruction once more: stores convert nothing, and conversions that change nothing are gone.
struct Lowered {
    code: Vec<Instruction>,
    lanes: Vec<Option<Lane>>,
}

/// Brings a program to the form that steps are made of. Registers are numbered anew.
fn lower(program: &Program) -> Lowered {
    let mut lowered = Lowered { code: Vec::new(), lanes: Vec::new() };
    // For each register its number now, and the dtype whose numbers it is known to hold.
    let mut now: Vec<(Register, Option<DType>)> = Vec::new();
    for (at, &instruction) in program.code().iter().enumerate() {
        let place = |register: Register| now[usize::from(register.0)].0;
        let known = |register: Register| now[usize::from(register.0)].1;
        let lane = program.lane(Register(at as u16));
        let (new, dtype) = match instruction {
            Instruction::Load(from) => (instruction, Some(program.operands()[from])),
            Instruction::Number(_) => (instruction, None),
            Instruction::Unary(op, a) => {
                let keeps = matches!(op, Unary::Neg | Unary::Abs | Unary::Relu) && lane == Some(Lane::F32);
                (Instruction::Unary(op, place(a)), known(a).filter(|_| keeps))
            }
            Instruction::Binary(Binary::Pow, a, b) if small_power(program, b).is_some() => {
                let from = place(a);
                let square = Instruction::Unary(Unary::Square, from);
                if small_power(program, b) == Some(2) {
                    (square, None)
                } else {
                    lowered.code.push(square);
                    lowered.lanes.push(lane);
                    (Instruction::Binary(Binary::Mul, Register((lowered.code.len() - 1) as u16), from), None)
                }
            }
            Instruction::Binary(op, a, b) => {
                let keeps = matches!(op, Binary::Maximum | Binary::Minimum) && known(a) == known(b);
                (Instruction::Binary(op, place(a), place(b)), known(a).filter(|_| keeps))
            }
            Instruction::Select(c, a, b) => {
                (Instruction::Select(place(c), place(a), place(b)), known(a).filter(|_| known(a) == known(b)))
            }
            Instruction::MulAdd(a, b, c) => (Instruction::MulAdd(place(a), place(b), place(c)), None),
            Instruction::Convert(a, dtype) => {
                let changes = program.lane(a) != Lane::of(dtype)
                    || (known(a) != Some(dtype)
                        && !matches!(dtype, DType::F32 | DType::F64 | DType::I64 | DType::Bool));
                if !changes {
                    now.push((place(a), Some(dtype)));
                    continue;
                }
                (Instruction::Convert(place(a), dtype), Some(dtype))
            }
            Instruction::Store(to, a) => {
                let dtype = program.operands()[to];
                let mut from = place(a);
                if program.lane(a) != Lane::of(dtype) {
                    lowered.code.push(Instruction::Convert(from, dtype));
                    lowered.lanes.push(Lane::of(dtype));
                    from = Register((lowered.code.len() - 1) as u16);
                }
                (Instruction::Store(to, from), None)
            }
        };
        now.push((Register(lowered.code.len() as u16), dtype));
        lowered.code.push(new);
        lowered.lanes.push(lane);
    }
    lowered
}

/// An exponent of 2, or of 3 for integers, that is a constant, whose power is products. A cube of floats would be rounded twice.
fn small_power(program: &Program, exponent: Register) -> Option<u8> {
    match program.code()[usize::from(exponent.0)] {
        Instruction::Number(Number::F32(2.0) | Number::F64(2.0) | Number::Int(2)) => Some(2),
        Instruction::Number(Number::Int(3)) => Some(3),
        _ => None,
    }
}

/// Where registers lie, while instructions become steps.
struct Places<'p> {
    program: &'p Program,
    lowered: Lowered,
    /// The instruction that reads a register last.
    last: Vec<usize>,
    places: Vec<Option<Place>>,
    steps: Steps,
    free: Vec<Place>,
}

impl Steps {
    /// The steps of a program on an instruction set. `lies` tells how an operand does; `is_apart` whether no store reaches what a
    /// load reads.
    pub(super) fn new(program: &Program, arch: Arch, lies: &dyn Fn(usize) -> Lies, is_apart: bool) -> Steps {
        let lowered = lower(program);
        let count = lowered.code.len();
        let mut last = vec![0; count];
        for (at, &instruction) in lowered.code.iter().enumerate() {
            reads(instruction).for_each(|register| last[usize::from(register.0)] = at);
        }
        let first_store = lowered.code.iter().position(|i| matches!(i, Instruction::Store(..))).unwrap_or(count);
        let mut at =
            Places { program, lowered, last, places: vec![None; count], steps: Steps::default(), free: vec![] };
        for n in 0..count {
            at.step(n, arch, lies, if is_apart { None } else { Some(first_store) });
        }
        at.steps
    }

    /// The bytes of an element in all slots.
    pub(super) fn element_bytes(&self) -> usize {
        self.slots.iter().sum()
    }
}

impl Places<'_> {
    fn place(&self, register: Register) -> Place {
        self.places[usize::from(register.0)].expect("a register that was defined")
    }

    /// A slot for elements of this many bytes.
    fn slot(&mut self, bytes: usize) -> Place {
        let operands = self.program.operands().len();
        let fits = |place: &Place| self.steps.slots[usize::from(*place) - operands] == bytes;
        match self.free.iter().position(fits) {
            Some(at) => self.free.swap_remove(at),
            None => self.new_slot(bytes),
        }
    }

    /// A slot that register `n` has from the first tile to the last: it is filled once.
    fn own_slot(&mut self, n: usize, bytes: usize) -> Place {
        self.last[n] = usize::MAX;
        self.new_slot(bytes)
    }

    fn new_slot(&mut self, bytes: usize) -> Place {
        self.steps.slots.push(bytes);
        (self.program.operands().len() + self.steps.slots.len() - 1) as Place
    }

    /// Makes the step of instruction `n`. `first_store`: where a store may change what is loaded after it.
    fn step(&mut self, n: usize, arch: Arch, lies: &dyn Fn(usize) -> Lies, first_store: Option<usize>) {
        let instruction = self.lowered.code[n];
        let is_plain = |dtype: DType| matches!(dtype, DType::F32 | DType::F64 | DType::I64);
        let dtype_of = |operand: usize| self.program.operands()[operand];
        let lane = self.lowered.lanes[n];
        match instruction {
            Instruction::Load(from) => {
                let in_place = is_plain(dtype_of(from))
                    && lies(from).dense
                    && first_store.is_none_or(|store| self.last[n] <= store);
                if in_place {
                    self.places[n] = Some(from as Place);
                } else {
                    let kernel = kernels::moves(arch, dtype_of(from)).expect("a program's dtype").0;
                    let bytes = lane.expect("a load's lane").bytes();
                    let once = lies(from).same && first_store.is_none();
                    let to = if once { self.own_slot(n, bytes) } else { self.slot(bytes) };
                    self.places[n] = Some(to);
                    let steps = if once { &mut self.steps.same } else { &mut self.steps.steps };
                    steps.push(Step::Load { kernel, to, operand: from as Place });
                }
            }
            Instruction::Number(number) => {
                let to = self.own_slot(n, lane.expect("a number's lane").bytes());
                self.places[n] = Some(to);
                self.steps.numbers.push((to, number));
            }
            Instruction::Store(to, from) => {
                let place = self.place(from);
                if place != to as Place {
                    let kernel = kernels::moves(arch, dtype_of(to)).expect("a program's dtype").1;
                    self.steps.steps.push(Step::Store { kernel, from: place, operand: to as Place });
                }
            }
            _ => {
                let store = self.stored_at(n).filter(|&to| {
                    first_store.is_none() && lies(to).dense && (is_plain(dtype_of(to)) || dtype_of(to) == DType::Bool)
                });
                let kernel = self.kernel(n, arch);
                let from: Vec<Place> = reads(instruction).map(|register| self.place(register)).collect();
                let from = [0, 1, 2].map(|n| from.get(n).copied().unwrap_or(0));
                let to = match store {
                    Some(to) => to as Place,
                    None => self.slot(lane.expect("a result's lane").bytes()),
                };
                self.places[n] = Some(to);
                self.steps.steps.push(Step::Compute { kernel, to, from });
            }
        }
        self.release(n, instruction);
    }

    /// The operand that the result of instruction `n` is stored to first.
    fn stored_at(&self, n: usize) -> Option<usize> {
        self.lowered.code[n..].iter().find_map(|instruction| match instruction {
            Instruction::Store(to, Register(from)) if usize::from(*from) == n => Some(*to),
            _ => None,
        })
    }

    /// Whether all that reads register `n` rounds it to 16 bits.
    fn is_rounded(&self, n: usize) -> bool {
        let is_short = |dtype: DType| matches!(dtype, DType::F16 | DType::BF16);
        self.lowered.code[n + 1..].iter().all(|&instruction| match instruction {
            Instruction::Convert(Register(from), dtype) if usize::from(from) == n => is_short(dtype),
            Instruction::Store(to, Register(from)) if usize::from(from) == n => is_short(self.program.operands()[to]),
            other => reads(other).all(|register| usize::from(register.0) != n),
        })
    }

    /// The loop of instruction `n`.
    fn kernel(&self, n: usize, arch: Arch) -> Kernel {
        let instruction = self.lowered.code[n];
        if let Instruction::Unary(op, a) = instruction
            && self.lowered.lanes[usize::from(a.0)] == Some(Lane::F32)
            && self.is_rounded(n)
            && let Some(kernel) = kernels::kernel(arch, Function::ShortUnary(op))
        {
            return kernel;
        }
        let lane = |register: Register| self.lowered.lanes[usize::from(register.0)].expect("a register's lane");
        let function = match instruction {
            Instruction::Unary(op, a) => Function::Unary(op, lane(a)),
            Instruction::Binary(op, a, _) => Function::Binary(op, lane(a)),
            Instruction::Select(_, a, _) => Function::Select(lane(a)),
            Instruction::MulAdd(a, ..) => Function::MulAdd(lane(a)),
            Instruction::Convert(a, dtype) => Function::Convert(lane(a), dtype),
            Instruction::Load(_) | Instruction::Number(_) | Instruction::Store(..) => unreachable!("no function"),
        };
        kernels::kernel(arch, function).expect("a program's functions are defined")
    }

    /// Gives back the slots of registers that instruction `n` read last.
    fn release(&mut self, n: usize, instruction: Instruction) {
        let operands = self.program.operands().len();
        for register in reads(instruction) {
            let register = usize::from(register.0);
            if let Some(place) = self.places[register]
                && self.last[register] == n
                && usize::from(place) >= operands
                && !self.free.contains(&place)
            {
                self.free.push(place);
            }
        }
    }
}
