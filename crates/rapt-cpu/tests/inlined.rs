//! No intrinsic became a call: every one is compiled into a part of a kernel that has its instruction set's features on.
//!
//! An intrinsic that the compiler did not inline is a function of its own in this very program, and its symbol table names
//! it. That is how a closure around a vector method shows: it is compiled by itself, lacks the features, and each
//! intrinsic in it becomes a call. Deliberately absent: any look at instructions.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use rapt_core::{Caps, Executor, Operands, Options, SerialExecutor, Spec, Tensors, View, ViewMut, Workspace};

fn number<const N: usize>(bytes: &[u8], at: usize) -> u64 {
    let mut wide = [0; 8];
    wide[..N].copy_from_slice(&bytes[at..at + N]);
    u64::from_le_bytes(wide)
}

/// The names in the symbol table of an ELF file of 64 bits.
fn symbols(elf: &[u8]) -> Vec<String> {
    const SYMTAB: u64 = 2;
    let headers = number::<8>(elf, 0x28) as usize;
    let (size, count) = (number::<2>(elf, 0x3A) as usize, number::<2>(elf, 0x3C) as usize);
    let section = |n: usize| headers + n * size;
    let range = |at: usize| {
        let first = number::<8>(elf, at + 0x18) as usize;
        first..first + number::<8>(elf, at + 0x20) as usize
    };
    let symtab = (0..count).map(section).find(|&at| number::<4>(elf, at + 4) == SYMTAB).expect("a symbol table");
    let names = &elf[range(section(number::<4>(elf, symtab + 0x28) as usize))];
    let name = |symbol: &[u8]| {
        let from = &names[number::<4>(symbol, 0) as usize..];
        let end = from.iter().position(|&byte| byte == 0).expect("a terminated name");
        String::from_utf8_lossy(&from[..end]).into_owned()
    };
    elf[range(symtab)].chunks_exact(24).map(name).collect()
}

/// So that the kernels are part of this program.
fn one_answer(executor: &dyn Executor) -> f32 {
    let (one, mut out) = ([1.0f32], [0.0f32]);
    let view = |name| View::contiguous(name, &one, [1, 1, 1, 1].into()).unwrap();
    let (q, k, v) = (view("q"), view("k"), view("v"));
    let spec = Spec::builder(&q, &k, &v, &Options::default()).build().unwrap();
    let plan = rapt_cpu::select(&spec, &Caps { arch: rapt_cpu::available()[0], threads: 1, clock_hz: None }).unwrap();
    let mut workspace = Workspace::new();
    workspace.ensure(plan.workspace_bytes()).unwrap();
    let out_view = ViewMut::contiguous("out", &mut out, [1, 1, 1, 1].into()).unwrap();
    let tensors = Tensors::new(q, k, v, out_view);
    let mut operands = Operands::check(tensors, &spec).unwrap();
    rapt_cpu::run(&plan, &mut operands, &mut workspace, executor).unwrap();
    out[0]
}

#[test]
fn no_intrinsic_is_a_function_of_its_own() {
    assert_eq!(one_answer(&SerialExecutor), 1.0);
    let elf = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let names = symbols(&elf);
    let is_part = |name: &String| name.contains("avx512") && name.contains("apart");
    assert!(names.iter().any(is_part), "the parts of kernels have names");
    let intrinsics = names.iter().filter(|name| name.contains("core_arch") && name.contains("_mm"));
    // With debug assertions loads and stores check their pointers, and some are calls for their length.
    let checked = |name: &str| cfg!(debug_assertions) && (name.contains("_loadu_") || name.contains("_storeu_"));
    let calls: Vec<_> = intrinsics.filter(|name| !checked(name)).collect();
    assert!(calls.is_empty(), "{calls:#?}");
}
