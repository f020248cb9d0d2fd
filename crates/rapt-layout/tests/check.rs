//! The checker on the shipped examples, and on one instance of each class of fault.
#![allow(missing_docs)]

use rapt_layout::Layout;
use rapt_layout::check::{self, Fault, Found, Report, Status};

fn example(name: &str) -> Vec<Report> {
    let path = format!("{}/../../examples/layout/{name}.toml", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    check::parse(&text).unwrap().iter().map(|check| check.run().unwrap()).collect()
}

/// One check of a tile of `rows` × `cols`.
fn run(rows: i64, cols: i64, dtype: &str, producer: &str, consumer: &str) -> Report {
    let text = format!(
        "[[check]]\nname = \"t\"\nrows = {rows}\ncols = {cols}\ndtype = \"{dtype}\"\n\
         [check.producer]\n{producer}\n[check.consumer]\n{consumer}\n"
    );
    check::parse(&text).unwrap()[0].run().unwrap()
}

fn classes(report: &Report) -> Vec<Fault> {
    report.faults.iter().map(|finding| finding.class).collect()
}

/// Every repair that changes a side, put in its place, is proven by a new check.
fn reprove(text: &str) {
    for mut check in check::parse(text).unwrap() {
        for repair in check.run().unwrap().repairs {
            let Some(side) = repair.side else { continue };
            let old = if repair.change == "store" { &mut check.producer } else { &mut check.consumer };
            let old = std::mem::replace(old, side);
            assert!(check.run().unwrap().proven, "{}: {}", check.name, repair.notation);
            *(if repair.change == "store" { &mut check.producer } else { &mut check.consumer }) = old;
        }
    }
}

#[test]
fn the_blackwell_example_is_settled() {
    let reports = example("blackwell_p_store");
    let [read, store] = reports.as_slice() else { panic!("two checks") };

    assert!(!read.proven);
    assert_eq!(read.elements, 128 * 64);
    assert_eq!(read.disagreements, 127 * 64, "row 0 alone agrees");
    assert!((0..64).all(|col| read.status(0, col) == Some(Status::Right)));
    assert_eq!(classes(read), [Fault::UnitMixUp], "{read}");
    let first = read.first.as_ref().unwrap();
    assert_eq!((first.row, first.col, &first.found), (1, 0, &Found::Element { row: 0, col: 64 }));
    assert_eq!(first.wrote.unwrap().to_string(), "lane 1, column 32, bits 0..16");
    assert_eq!(first.reads.unwrap().to_string(), "lane 0, column 64, bits 0..16");
    let poison = read.first_poison.as_ref().unwrap();
    assert_eq!((poison.row, poison.reads.unwrap().to_string().as_str()), (2, "lane 0, column 96, bits 0..16"));
    assert_eq!(read.repairs.len(), 1);
    assert_eq!(read.repairs[0].change, "read");
    assert_eq!(read.repairs[0].notation, "(128,64):(131072,1) in tmem-elements:16, offset 64");

    assert!(!store.proven);
    assert_eq!(classes(store), [Fault::Transposed], "{store}");
    assert_eq!(store.poisoned, 0, "every cell is written, by others");
    assert_eq!(store.repairs[0].change, "store");
    assert_eq!(store.repairs[0].notation, "(128,64):(65536,1) in tmem-cells, offset 32, 2 to one");

    for report in example("blackwell_p_store_fixed") {
        assert!(report.proven, "{report}");
    }
}

#[test]
fn the_naive_formulas_agree_in_row_0_alone() {
    let c: Layout = "((128,128),1,1):((65536,1),0,0)".parse().unwrap();
    let a: Layout = "((128,16),1,4):((64,1),0,16)".parse().unwrap();
    assert_eq!((c.cosize(), c.range().1), (8_323_200, 8_323_199));
    let rows: Vec<i64> =
        (0..128).filter(|row| (0..64).any(|col| c.at(row + 128 * col) == a.at(row + 128 * col))).collect();
    assert_eq!(rows, [0]);
    assert!((0..64).all(|col| c.at(128 * col) == a.at(128 * col)), "all of row 0");
}

#[test]
fn hopper_f16_feeds_from_registers_and_fp8_needs_a_permutation_of_v() {
    assert!(example("hopper_p_registers_f16")[0].proven);
    assert!(example("ampere_p_registers")[0].proven);

    let report = &example("hopper_p_registers_fp8")[0];
    assert_eq!(classes(report), [Fault::Permuted]);
    let feed = report.feed.as_ref().unwrap();
    assert!(!feed.as_is && feed.stays_in_thread);
    assert_eq!(feed.v_permutation[..16], [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]);
    assert!((0..128).all(|k| feed.v_permutation[k] == feed.v_permutation[k % 16] + k / 16 * 16));
    assert_eq!(feed.value_order[..8], [0, 1, 4, 5, 2, 3, 6, 7]);
    let shuffle = feed.shuffle.as_ref().unwrap();
    assert!(shuffle.within_quads);
    assert_eq!(shuffle.values_moved + shuffle.values_kept, 64 * 128);
    assert_eq!(report.repairs.len(), 2);
}

/// P·V in integers through the fragments: threads permute their own values, V's rows are taken in the order π.
#[test]
fn the_fp8_permutation_computes_the_same_product() {
    use rapt_layout::atlas::{Atom, Map};
    let tv = |name: &str| match Atom::named(name).unwrap().map {
        Map::Registers { tv } => tv,
        Map::Storage { .. } => unreachable!(),
    };
    let (d, a) = (tv("wgmma.m64n32k32.f32.d"), tv("wgmma.m64n8k32.e4m3.a"));
    let report = run(64, 32, "e4m3", "atom = \"wgmma.m64n32k32.f32.d\"", "atom = \"wgmma.m64n8k32.e4m3.a\"");
    let feed = report.feed.unwrap();
    let p = |row: i64, col: i64| row * 31 + col * 7 % 13;
    let v = |row: usize| i64::try_from(row * row % 17).unwrap();
    let mut sums = [0; 64];
    for (thread, value) in (0..128).flat_map(|t| (0..16usize).map(move |v| (t, v))) {
        let place = d.at_coord(&[thread, feed.value_order[value]].into()).unwrap();
        let held = p(place % 64, place / 64);
        let wanted = a.at_coord(&[thread, i64::try_from(value).unwrap()].into()).unwrap();
        let k = usize::try_from(wanted / 64).unwrap();
        sums[usize::try_from(wanted % 64).unwrap()] += held * v(feed.v_permutation[k]);
    }
    for (row, sum) in (0..).zip(sums) {
        assert_eq!(sum, (0..32).map(|k| p(row, k) * v(usize::try_from(k).unwrap())).sum::<i64>(), "row {row}");
    }
}

const A: &str = "atom = \"tcgen05.a.m128.k64.bf16\"";

/// A producer's rows of 32 cells each in tensor memory.
fn cells(more: &str) -> String {
    format!("layout = \"(128,32):(65536,1)\"\nunit = \"tmem-cells\"\n{more}")
}

/// What the checker says of two sides: the classes of the fault, and the repair that comes first.
#[track_caller]
fn expect(producer: &str, consumer: &str, [rows, cols]: [i64; 2], expect: &[Fault], notation: &str) {
    let report = run(rows, cols, "bf16", producer, consumer);
    assert_eq!(classes(&report), expect, "{report}");
    let found = report.repairs.first().map_or("", |repair| &repair.notation);
    assert_eq!(found, notation, "{report}");
}

#[test]
fn offsets_and_units_are_named_and_repaired() {
    let check = |producer: &str, consumer: &str, faults: &[Fault], notation: &str| {
        expect(producer, consumer, [128, 64], faults, notation);
    };
    assert!(run(128, 64, "bf16", &cells("packed = 2"), A).proven);
    let right = "(128,32):(65536,1) in tmem-cells, offset 32, 2 to one";
    check(&cells("packed = 2"), &format!("{A}\noffset = 64"), &[Fault::MissingColumnOffset], right);
    // The offset of 32 columns given where 16-bit elements are counted.
    check(
        &cells("packed = 2\noffset = 32"),
        &format!("{A}\noffset = 32"),
        &[Fault::MissingColumnOffset],
        "(128,32):(65536,1) in tmem-cells, offset 16, 2 to one",
    );
    check(
        &cells("packed = 2\noffset = 64\noffset_unit = \"tmem-elements:8\""),
        &format!("{A}\noffset = 64"),
        &[Fault::MissingColumnOffset],
        "(128,32):(65536,1) in tmem-cells, offset 128 tmem-elements:8, 2 to one",
    );
    let elements = "layout = \"(128,64):(131072,1)\"\nunit = \"tmem-cells\"";
    check(elements, A, &[Fault::UnitMixUp], "(128,64):(131072,1) in tmem-elements:16");
    // Both at once: another unit and another offset.
    check(
        elements,
        &format!("{A}\noffset = 64"),
        &[Fault::UnitMixUp, Fault::MissingColumnOffset],
        "(128,64):(131072,1) in tmem-elements:16, offset 32 tmem-cells",
    );
}

#[test]
fn packing_order_and_counts_are_named_and_repaired() {
    let check = |producer: &str, faults: &[Fault], notation: &str| expect(producer, A, [128, 64], faults, notation);
    let one_each = "layout = \"(128,64):(65536,1)\"\nunit = \"tmem-cells\"";
    let two_each = "(128,32):(65536,1) in tmem-cells, 2 to one";
    check(one_each, &[Fault::Packing], two_each);
    check(&format!("{one_each}\ndtype = \"f32\""), &[Fault::Packing], two_each);
    // 32 cells in a row for 64 values: one to a cell leaves half of them without a place.
    check(&cells(""), &[Fault::Packing, Fault::CountPerThread], two_each);
    let same_column = "layout = \"(128,32):(65536,0)\"\nunit = \"tmem-cells\"\npacked = 2";
    check(same_column, &[Fault::Overlapped], two_each);
    check(
        "layout = \"(32,128):(1,65536)\"\nunit = \"tmem-cells\"\npacked = 2",
        &[Fault::Transposed],
        "(32,128):(1,65536) in tmem-cells, 2 to one, rows first",
    );
    let st = |count| format!("tv = \"(128,64):(1,128)\"\nby = \"tcgen05.st.32x32b.x{count}\"");
    assert!(run(128, 64, "bf16", &st(32), A).proven);
    check(&st(16), &[Fault::CountPerThread], "(thread,value) (128,64):(1,128) by tcgen05.st.32x32b.x32");
}

#[test]
fn swizzles_and_gaps_are_named_and_repaired() {
    let smem = |more: &str| format!("layout = \"(64,64):(64,1)\"\nunit = \"shared-elements:16\"\n{more}");
    let check = |producer: &str, consumer: &str, faults: &[Fault], notation: &str| {
        expect(producer, consumer, [64, 64], faults, notation);
    };
    check(
        &smem(""),
        "atom = \"wgmma.smem.k.128b.f16\"",
        &[Fault::WrongSwizzle],
        "(64,64):(64,1) in shared-elements:16, 128-byte swizzle",
    );
    check(
        &smem("swizzle = \"128b\"\noffset = 512"),
        "atom = \"wgmma.smem.k.32b.f16.x64\"\ncols = 16",
        &[Fault::Uncovered],
        "Sw<1,4,3> o 0 o (64,16):(32,2) in shared-bytes",
    );
    // Rows 0 … 63 in lanes 0 … 63, where M = 64 scatters them over the four warps.
    check(
        "layout = \"(64,32):(65536,1)\"\nunit = \"tmem-cells\"\npacked = 2",
        "atom = \"tcgen05.a.m64.k64.bf16\"",
        &[Fault::Uncovered],
        "((16,4),32):((65536,2097152),1) in tmem-cells, 2 to one",
    );
}

#[test]
fn accumulators_come_out_of_tensor_memory_as_threads_want_them() {
    let c = "atom = \"tcgen05.c.m128.n64\"";
    let ld = |tv: &str, by: &str| format!("tv = \"{tv}\"\nby = \"tcgen05.ld.{by}\"");
    assert!(run(128, 64, "f32", c, &ld("(128,64):(1,128)", "32x32b.x64")).proven);
    // 16x256b hands a warp the fragment of mma's accumulator: 16 rows, then 16 more in further registers.
    let fragment = "((4,8,4),(2,2,8,2)):((256,1,32),(128,8,1024,16))";
    assert!(run(128, 64, "f32", c, &ld(fragment, "16x256b.x8")).proven);
    assert!(!run(128, 64, "f32", c, &ld(fragment, "32x32b.x64")).proven);
    // Two half columns to a register on the way out.
    let halves = "layout = \"(128,64):(65536,1)\"\nunit = \"tmem-cells\"";
    assert!(run(128, 64, "f16", halves, &ld("(128,64):(1,128)", "32x32b.x32.pack16")).proven);
}

#[test]
fn a_whole_tensor_memory_of_128_by_512() {
    let producer = "layout = \"(128,512):(65536,1)\"\nunit = \"tmem-cells\"";
    for (consumer, is_same) in [
        ("atom = \"tcgen05.c.m128.n256\"\ncols = 256", true),
        (producer, true),
        ("layout = \"(128,512):(512,1)\"\nunit = \"tmem-cells\"", false),
        ("layout = \"(512,128):(1,65536)\"\nunit = \"tmem-cells\"", false),
        ("layout = \"((2,64),512):((4194304,65536),1)\"\nunit = \"tmem-cells\"", false),
    ] {
        assert_eq!(run(128, 512, "f32", producer, consumer).proven, is_same, "{consumer}");
    }
}

#[test]
fn files_are_refused_with_the_cause() {
    let check = |text: &str, expect: &str| {
        let error = check::parse(text).and_then(|checks| checks[0].run()).unwrap_err();
        assert!(error.to_string().contains(expect), "{error}");
    };
    let head = "[[check]]\nname = \"t\"\nrows = 128\ncols = 64\ndtype = \"bf16\"\n";
    let with =
        |producer: &str, consumer: &str| format!("{head}[check.producer]\n{producer}\n[check.consumer]\n{consumer}\n");
    let a = "atom = \"tcgen05.a.m128.k64.bf16\"";
    check("", "missing field `check`");
    check("check = []", "no [[check]]");
    check("[[check]]\nname = 3", "line 2, column 8");
    check(&with("colour = 1", a), "unknown field `colour`");
    check(&with("layout = \"(4,\"\nunit = \"tmem-cells\"", a), "character 3");
    check(&with("layout = \"(4,8)\"", a), "a layout needs its unit");
    check(&with("layout = \"(4,8)\"\nunit = \"feet\"", a), "unit \"feet\": allowed are tmem-cells");
    check(&with("layout = \"(4,8)\"\nunit = \"tmem-cells\"\noffset_unit = \"shared-bytes\"", a), "different units");
    check(&with("atom = \"tcgen05.z\"", a), "tcgen05.c.m{128");
    check(&with("atom = \"tcgen05.a.m128.k128.bf16\"", a), "is 128 × 128, the tile 128 × 64");
    check(&with(&format!("{a}\ntv = \"4:1\""), a), "exactly one of layout, tv and atom");
    check(&with("tv = \"(128,64):(1,128)\"", a), "the producer writes registers, the consumer reads tensor memory");
    check(&with("tv = \"(128,64):(1,128)\"\nby = \"ldmatrix.x4\"", a), "tcgen05.ld or tcgen05.st is asked");
    check(&with("tv = \"(128,65):(1,128)\"\nby = \"tcgen05.st.32x32b.x32\"", a), "reaches element");
    check(&with("layout = \"(128,32):(65536,1)\"\nunit = \"tmem-cells\"\npacked = 3", a), "packed = 3");
    check(&with("tv = \"(1,8388608):(0,0)\"", "tv = \"(128,64):(1,128)\""), "values in a thread");
    check(&with("layout = \"(128,32):(4611686018427387000,1)\"\nunit = \"tmem-cells\"", a), "overflows");
    check(&with("layout = \"(128,32):(36028797018963968,1)\"\nunit = \"tmem-cells\"\npacked = 2", a), "overflows");
    check(&head.replace("128", "9999999999"), "missing field `producer`");
    check(&with(a, a).replace("rows = 128", "rows = 99999999"), "rows and cols lie in");
    check(&with(a, a).replace("bf16\"\n[", "bf17\"\n["), "dtype \"bf17\"");
}

#[test]
fn reports_are_json() {
    let text =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/layout/blackwell_p_store.toml"));
    reprove(text.as_deref().unwrap());
    let report = &example("blackwell_p_store")[0];
    let json = report.to_json(true);
    assert_eq!(json["proven"], false);
    assert_eq!(json["faults"][0]["class"], "unit_mix_up");
    assert_eq!(json["first"]["wrote"]["lane"], 1);
    assert_eq!(json["first"]["reads"]["bits"], serde_json::json!([0, 16]));
    assert_eq!(json["first_poison"]["found"]["what"], "nothing");
    assert_eq!(json["map"].as_array().unwrap().len(), 128);
    assert_eq!(json["map"][0], ".".repeat(64));
    assert!(report.to_json(false).get("map").is_none());
}
