//! `rapt layout` as its users see it: text, JSON, pictures and exit codes.
#![allow(missing_docs)]

use std::process::{Command, Output};

const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/layout");

fn layout(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_rapt")).arg("layout").args(args).output().expect("the binary starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text")
}

fn prints(args: &[&str]) -> String {
    let output = layout(args);
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

fn json(args: &[&str]) -> serde_json::Value {
    let output = layout(&[args, &["--json"]].concat());
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{args:?}: {error}: {}", text(&output.stderr)))
}

fn refuses(args: &[&str], code: i32, expect: &str) {
    let output = layout(args);
    assert_eq!(output.status.code(), Some(code), "{args:?}");
    assert!(text(&output.stderr).contains(expect), "{args:?}: {}", text(&output.stderr));
}

fn example(name: &str) -> String {
    format!("{EXAMPLES}/{name}.toml")
}

#[test]
fn the_algebra_answers_in_notation() {
    let check = |args: &[&str], expect: &str| assert_eq!(prints(args).trim_end(), expect, "{args:?}");
    check(&["compose", "((128,128),1,1):((65536,1),0,0)", "(128,64)"], "(128,64):(65536,1)");
    check(&["compose", "(12,(4,8)):(59,(13,1))", "<3:4,8:2>"], "(3,(2,4)):(236,(26,1))");
    check(&["compose", "Sw<3,4,3> o (8,128):(128,1)", "8:1"], "Sw<3,4,3> o 0 o 8:128");
    check(&["complement", "4:2", "24"], "(2,3):(1,8)");
    check(&["complement", "(2,2):(1,6)"], "3:2");
    check(&["divide", "(4,2,3):(2,1,8)", "4:2"], "((2,2),(2,3)):((4,1),(2,8))");
    check(&["divide", "(8,8):(8,1)", "(4,2)", "--as", "zipped"], "((4,2),(2,4)):((8,1),(32,2))");
    check(&["divide", "(8,8):(8,1)", "<4,_>", "--as", "tiled"], "((4,1),2,8):((8,0),32,1)");
    check(&["product", "(2,2):(4,1)", "6"], "((2,2),(2,3)):((4,1),(2,8))");
    check(&["product", "(2,5):(5,1)", "(3,4):(1,3)", "--as", "blocked"], "((2,3),(5,4)):((5,10),(1,30))");
    check(&["product", "(2,5):(5,1)", "(3,4)", "--as", "raked"], "((3,2),(4,5)):((10,5),(30,1))");
    check(&["coalesce", "(2,(1,6)):(1,(6,2))"], "12:1");
    check(&["coalesce", "(2,(1,6)):(1,(6,2))", "--by", "(1,1)"], "(2,6):(1,2)");
    check(&["inverse", "(4,8):(8,1)"], "(8,4):(4,1)");
    check(&["inverse", "(4,8):(16,1)", "--left"], "(16,4):(4,1)");
    check(&["flatten", "((2,3),4)"], "(2,3,4):(1,2,6)");
    check(&["filter", "(4,2):(1,0)"], "4:1");
    check(&["slice", "(4,8):(8,1)", "(_,3)"], "4:8\noffset 3");
    check(&["recast", "(128,64):(65536,1)", "--from", "32", "--to", "16"], "(128,128):(131072,1)");
    check(&["eval", "Sw<3,4,3> o (8,128):(128,1)", "(3,20)"], "420");
}

#[test]
fn the_numbers_of_the_accumulator() {
    let c = json(&["show", "((128,128),1,1):((65536,1),0,0)"]);
    assert_eq!((&c["size"], &c["cosize"], &c["largest"]), (&16384.into(), &8_323_200.into(), &8_323_199.into()));
    let table = prints(&["show", "((128,128),1,1):((65536,1),0,0)"]);
    assert!(table.contains("cosize 8323200, largest 8323199") && table.contains("32 rows × 16 columns of 128 × 128"));
}

#[test]
fn atoms_are_shown_as_text_and_pictures() {
    let folder = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let path = folder.join(format!("atom-{}.svg", std::process::id()));
    let file = path.to_str().unwrap();
    let table = prints(&["show", "mma.m16n8k16.f32.c", "--svg", file]);
    assert!(table.contains(" 0|  T0V0  T0V1  T1V0") && table.contains("PTX ISA"), "{table}");
    let svg = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(svg.starts_with("<svg ") && svg.contains(">T31V3<"));
    assert!(prints(&["show", "mma.m16n8k16.f32.c", "--color", "always"]).contains("\x1b[30;48;5;"));
    let atom = json(&["show", "wgmma.m64n128k16.f16.a"]);
    assert_eq!(atom["tv"], "((4,8,4),(2,2,2)):((128,1,16),(64,8,512))");
    assert!(json(&["atoms"]).as_array().unwrap().len() > 100);
    refuses(&["show", "wgmma.m64n7k16.f16.a"], 2, "wgmma.m64n{8…256}");
}

#[test]
fn two_units_are_not_compared() {
    let (c, a) = ("((128,128),1,1):((65536,1),0,0)", "((128,16),1,4):((64,1),0,16)");
    let bare = json(&["compare", c, a]);
    assert_eq!((&bare["equal"], &bare["compared"], &bare["same"]), (&64.into(), &8192.into(), &false.into()));
    assert_eq!(bare["rows_with_an_equal_value"], serde_json::json!([0]));
    assert_eq!(bare["rows_wholly_equal"], serde_json::json!([0]));
    assert_eq!(layout(&["compare", c, a]).status.code(), Some(1));
    assert_eq!(layout(&["compare", "(4,8)", "32:1"]).status.code(), Some(0));
    refuses(&["compare", c, a, "--units", "tmem-cells,tmem-elements:16"], 2, "different units");
    refuses(&["compare", c, a, "--units", "tmem-cells"], 2, "two units are needed");
    assert_eq!(layout(&["compare", c, c, "--units", "tmem-cells,tmem-cells"]).status.code(), Some(0));
}

#[test]
fn checks_have_exit_codes_for_ci() {
    for (name, code) in [
        ("blackwell_p_store", 1),
        ("blackwell_p_store_fixed", 0),
        ("blackwell_p_flows", 0),
        ("hopper_p_registers_f16", 0),
        ("hopper_p_registers_fp8", 1),
        ("hopper_smem_swizzle", 1),
        ("ampere_p_registers", 0),
    ] {
        assert_eq!(layout(&["check", &example(name)]).status.code(), Some(code), "{name}");
        assert_eq!(json(&["check", &example(name)])["proven"], code == 0, "{name}");
    }
    let output = layout(&["check", &example("blackwell_p_store")]);
    let said = text(&output.stdout);
    for word in
        ["REFUTED", "unit mix up", "lane 1, column 32, bits 0..16", "(128,64):(65536,1) in tmem-cells, offset 32"]
    {
        assert!(said.contains(word), "{word}: {said}");
    }
    let mapped = layout(&["check", &example("blackwell_p_store"), "--only", "C store, A-fragment read", "--map"]);
    assert!(text(&mapped.stdout).contains(&format!("\n{}\n{}\n", ".".repeat(64), "x".repeat(64))));
}

#[test]
fn the_emulator_answers_with_cosines_and_poison() {
    let broken = json(&["emulate", &example("blackwell_p_store")]);
    assert_eq!(broken["works"], false);
    let flows = broken["flows"].as_array().unwrap();
    assert_eq!(flows.len(), 6, "two flows, three seeds");
    assert_eq!(flows[0]["first_poison"]["place"]["lane"], 0);
    assert_eq!(flows[0]["first_poison"]["place"]["column"], 128);
    assert!(flows[3..].iter().all(|flow| flow["cosine"].as_f64().unwrap().abs() < 0.1));
    let works = layout(&["emulate", &example("blackwell_p_store_fixed"), "--softmax", "--seed", "9"]);
    assert!(works.status.success() && text(&works.stdout).contains("cosine 0.99999"), "{}", text(&works.stdout));
}

#[test]
fn mistakes_are_2_and_say_where() {
    refuses(&["coalesce", "(4,"], 2, "character 3");
    refuses(&["show", "(4,"], 2, "character 3");
    refuses(&["compose", "(6,2):(8,2)", "4:4"], 2, "neither divides");
    refuses(&["complement", "(4,4):(1,2)", "16"], 2, "no multiple");
    refuses(&["divide", "8", "2", "--as", "raked"], 2, "logical, zipped, tiled, flat");
    refuses(&["eval", "(4,8)", "(4,0)"], 2, "does not fit");
    refuses(&["check", "no-such-file.toml"], 2, "no-such-file.toml");
    refuses(&["check", &example("blackwell_p_store"), "--only", "x"], 2, "C store, A-fragment read");
    refuses(&["emulate", &example("hopper_smem_swizzle")], 2, "128 rows");
    refuses(&["show", "(99999999,99999999):(1,1)", "--rows", "99999999999"], 0, "");
}
