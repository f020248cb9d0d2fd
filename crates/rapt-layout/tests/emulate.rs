//! The emulator: the flows of the tutorial, and each kind of instruction.
#![allow(missing_docs)]

use rapt_layout::atlas::Atom;
use rapt_layout::check::{self, Check, Side, Source, Stored};
use rapt_layout::emulate::{Case, Machine, Outcome, run};
use rapt_layout::unit::Unit;
use rapt_layout::{Dtype, Error, Layout};

fn checks(name: &str) -> Vec<Check> {
    let path = format!("{}/../../examples/layout/{name}.toml", env!("CARGO_MANIFEST_DIR"));
    check::parse(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn outcomes(check: &Check) -> Vec<Outcome> {
    let cases = [false, true].into_iter().flat_map(|softmax| [1, 2, 3].map(|seed| Case { seed, softmax }));
    cases.map(|case| run(check, case).unwrap()).collect()
}

#[test]
fn working_flows_reach_the_cosine() {
    let working = ["blackwell_p_flows", "blackwell_p_store_fixed"];
    for outcome in working.iter().flat_map(|name| checks(name)).flat_map(|check| outcomes(&check)) {
        assert!(outcome.cosine.unwrap() >= 0.99999, "{outcome}");
        assert_eq!(outcome.poisoned, 0);
    }
}

#[test]
fn a_c_store_read_by_the_a_fragment_is_poison_and_names_the_cell() {
    for outcome in outcomes(&checks("blackwell_p_store")[0]) {
        assert_eq!(outcome.cosine, None);
        let poison = outcome.first_poison.as_ref().unwrap();
        // Rows 1 and 2 read P of lane 0 and what is left of S; row 3 begins behind S.
        assert_eq!((poison.row, poison.col), (3, 0));
        assert_eq!(poison.place.unwrap().to_string(), "lane 0, column 128, bits 0..16");
        assert_eq!(outcome.poisoned, 125 * 64);
        assert!(outcome.to_string().contains("lane 0, column 128"), "{outcome}");
    }
}

#[test]
fn an_a_fragment_store_gives_an_output_of_no_likeness() {
    for outcome in outcomes(&checks("blackwell_p_store")[1]) {
        assert!(outcome.cosine.unwrap().abs() < 0.1, "{outcome}");
    }
}

#[test]
fn repairs_of_the_checker_work_in_the_emulator() {
    let mut tried = 0;
    for check in checks("blackwell_p_store") {
        for repair in check.run().unwrap().repairs {
            tried += 1;
            let mut repaired = check.clone();
            let side = repair.side.unwrap();
            if repair.change == "store" {
                repaired.producer = side;
            } else {
                repaired.consumer = side;
            }
            for outcome in outcomes(&repaired) {
                assert!(outcome.cosine.unwrap() >= 0.99999, "{outcome}");
            }
        }
    }
    assert!(tried > 0, "the checker reports repairs");
}

#[test]
fn f32_and_f16_stores_behave_alike() {
    let text = std::fs::read_to_string(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../examples/layout/blackwell_p_store_fixed.toml"
    ));
    let f16 = text.unwrap().replace("bf16", "f16");
    for check in check::parse(&f16).unwrap() {
        assert!(run(&check, Case { seed: 4, softmax: true }).unwrap().cosine.unwrap() >= 0.99999);
    }
    // In f32 a row has 128 cells, and the A fragment stored through the C fragment is P transposed.
    let text = "[[check]]\nname = \"f32\"\nrows = 128\ncols = 128\ndtype = \"f32\"\n[check.producer]\n\
        layout = \"(128,128):(65536,1)\"\ncompose = \"((128,8),1,16):((128,1),0,8)\"\nunit = \"tmem-cells\"\noffset = 128\n\
        [check.consumer]\natom = \"tcgen05.a.m128.k128.tf32\"\noffset = 128\n";
    let check = &check::parse(text).unwrap()[0];
    let report = check.run().unwrap();
    assert_eq!(report.faults[0].class, check::Fault::Transposed);
    for outcome in outcomes(check) {
        assert!(outcome.cosine.unwrap().abs() < 0.1, "{outcome}");
    }
}

fn registers(atom: &str, dtype: Dtype, size: [i64; 2]) -> Side {
    Side::of_atom(&Atom::named(atom).unwrap(), dtype, size, 0).unwrap()
}

/// Small whole numbers, exact in every dtype.
fn numbers(len: usize, step: usize) -> Vec<f32> {
    (0..len).map(|at| ((at * step + at / 7) % 13) as f32 - 6.0).collect()
}

fn expect(a: &[f32], b: &[f32], [m, k, n]: [usize; 3]) -> Vec<f32> {
    (0..m * n).map(|at| (0..k).map(|d| a[at % m + m * d] * b[d + k * (at / m)]).sum()).collect()
}

/// Registers of an atom behind those of others: values start at a multiple of whole registers.
fn behind(side: Side, at: i64) -> Side {
    let Source::Registers { tv } = &side.source else { unreachable!() };
    let stored = Stored { offset: at, ..Stored::new(inverse(tv, side.dtype), Unit::Registers) };
    assert_eq!(side.dtype.bits(), 32);
    Side { source: Source::Stored(stored), ..side }
}

/// (row, column) ↦ thread << 16 | register, for 32-bit elements.
fn inverse(tv: &Layout, dtype: Dtype) -> Layout {
    assert_eq!(dtype.bits(), 32);
    let threads = tv.mode(0).unwrap().size();
    let values = tv.size() / threads;
    let places = Layout::new([threads, values], [1 << 16, 1]).unwrap();
    places.compose(&tv.right_inverse().unwrap()).unwrap()
}

#[test]
fn mma_sync_multiplies_through_its_fragments() {
    for (dtype, sum, k) in [("f16", "f32", 16), ("bf16", "f32", 8), ("tf32", "f32", 8), ("s8", "s32", 32)] {
        let mut machine = Machine::new();
        let kind: Dtype = dtype.parse().unwrap();
        let a = registers(&format!("mma.m16n8k{k}.{dtype}.a"), kind, [16, k]);
        let b = registers(&format!("mma.m16n8k{k}.{dtype}.b"), kind, [k, 8]);
        let d = behind(registers(&format!("mma.m16n8k16.{sum}.c"), sum.parse().unwrap(), [16, 8]), 16);
        let depth = usize::try_from(k).unwrap();
        let (left, right) = (numbers(16 * depth, 5), numbers(depth * 8, 3));
        // A and B in one register file would overlap: B goes through shared memory.
        let lines = Stored::new(Layout::column_major([k, 8]).unwrap(), Unit::SharedElements(kind.bits()));
        let stored = Side::stored("B", kind, [k, 8], lines);
        machine.write(&stored, &right).unwrap();
        machine.write(&a, &left).unwrap();
        assert_eq!(machine.multiply(&a, &stored, &d, false).unwrap(), []);
        assert_eq!(machine.read(&d).unwrap().values, expect(&left, &right, [16, depth, 8]), "{dtype}");
        machine.copy(&stored, &b).unwrap();
        assert_eq!(machine.read(&b).unwrap().values, right);
    }
}

#[test]
fn ldmatrix_makes_the_a_fragment_of_mma() {
    let mut machine = Machine::new();
    // A 16 × 16 tile by rows. Four matrices: rows 0-7 and 8-15 of columns 0-7, then of columns 8-15.
    let tile = Side::stored("A", Dtype::F16, [16, 16], Stored::new(layout("(16,16):(16,1)"), Unit::SharedElements(16)));
    let matrices = Stored::new(layout("(8,(8,2,2)):(16,(1,128,8))"), Unit::SharedElements(16));
    let matrices = Side::stored("matrices", Dtype::F16, [8, 32], matrices);
    let values = numbers(256, 5);
    machine.write(&tile, &values).unwrap();
    machine.copy(&matrices, &registers("ldmatrix.x4", Dtype::F16, [8, 32])).unwrap();
    let fragment = registers("mma.m16n8k16.f16.a", Dtype::F16, [16, 16]);
    assert_eq!(machine.read(&fragment).unwrap().values, values);
    // And back with stmatrix, transposed by .trans.
    let turned = Stored::new(layout("(8,(8,2,2)):(1,(16,8,128))"), Unit::SharedElements(16));
    let turned = Side::stored("turned", Dtype::F16, [8, 32], Stored { offset: 1024, ..turned });
    machine.copy(&registers("stmatrix.x4", Dtype::F16, [8, 32]), &turned).unwrap();
    let whole = Stored { offset: 1024, ..Stored::new(layout("(16,16):(1,16)"), Unit::SharedElements(16)) };
    assert_eq!(machine.read(&Side::stored("whole", Dtype::F16, [16, 16], whole)).unwrap().values, values);
}

fn layout(text: &str) -> Layout {
    text.parse().unwrap()
}

#[test]
fn wgmma_reads_swizzled_shared_memory_and_its_own_accumulator() {
    let mut machine = Machine::new();
    let (q, k) = (numbers(64 * 64, 5), numbers(64 * 64, 11));
    let a = registers("wgmma.smem.k.128b.f16", Dtype::F16, [64, 64]);
    let b = Side { source: behind_shared("wgmma.smem.mn.128b.f16", 8192), ..a.clone() };
    machine.write(&a, &q).unwrap();
    machine.write(&b, &k).unwrap();
    let d = registers("wgmma.m64n64k16.f32.d", Dtype::F32, [64, 64]);
    assert_eq!(machine.multiply(&a, &b, &d, false).unwrap(), []);
    let s = expect(&q, &k, [64, 64, 64]);
    assert_eq!(machine.read(&d).unwrap().values, s);
    machine.multiply(&a, &b, &d, true).unwrap();
    assert_eq!(machine.read(&d).unwrap().values, s.iter().map(|x| 2.0 * x).collect::<Vec<_>>());
    // The accumulator, rounded in place value by value, is the A operand of the next product.
    let p: Vec<f32> = s.iter().map(|x| x % 7.0).collect();
    machine.write(&registers("wgmma.m64n64k16.f16.d", Dtype::F16, [64, 64]), &p).unwrap();
    assert_eq!(machine.read(&registers("wgmma.m64n64k16.f16.a", Dtype::F16, [64, 64])).unwrap().values, p);
}

fn behind_shared(atom: &str, bytes: i64) -> Source {
    let Source::Stored(stored) = registers(atom, Dtype::F16, [64, 64]).source else { unreachable!() };
    Source::Stored(Stored { offset: bytes, ..stored })
}

#[test]
fn poison_is_read_as_nan_and_named() {
    let mut machine = Machine::new();
    let c = registers("tcgen05.c.m64.n8", Dtype::F32, [64, 8]);
    let nothing = machine.read(&c).unwrap();
    assert!(nothing.values.iter().all(|x| x.is_nan()) && nothing.poison.len() == 512);
    assert_eq!(nothing.poison[8 * 17].place.unwrap().to_string(), "lane 33, column 0, bits 0..32");
    let outside = Stored { offset: 508, ..Stored::new(layout("(64,8):(65536,1)"), Unit::TmemCells) };
    let outside = Side::stored("outside", Dtype::F32, [64, 8], outside);
    let error = machine.write(&outside, &[0.0; 512]).unwrap_err();
    assert!(matches!(&error, Error::OutOfMemory { what } if what.contains("lane 0, column 512")), "{error}");
    let fp8 = registers("tcgen05.a.m128.k32.e4m3", Dtype::E4m3, [128, 32]);
    assert!(matches!(machine.write(&fp8, &[0.0; 4096]), Err(Error::Word { .. })));
    let memory = Side::stored("memory", Dtype::F32, [4, 4], Stored::new(layout("(4,4)"), Unit::Bytes));
    assert!(machine.read(&memory).is_err());
    assert!(run(&checks("hopper_smem_swizzle")[0], Case { seed: 1, softmax: false }).is_err());
}
