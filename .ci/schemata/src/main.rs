//! Writes every mutant of cargo-mutants into one build, each behind a switch.
//!
//! ```text
//! schemata LIST ROOT WITHOUT
//! ```
//!
//! `LIST` is what `cargo mutants --list --json` prints; a mutant's number is its place in that
//! list. The sources under `ROOT`, a copy, are rewritten: an expression that has mutants becomes a
//! `match` on which of them is switched on, a function begins with an early return. Nothing moves
//! to another line. The numbers in the file `WITHOUT` are left out.
//!
//! Prints `NUMBER SWITCH FILE START END` for each mutant: the number that is told when its switch
//! is reached, and the bytes that were written for it, which is where the compiler's complaint
//! about it will be. For a mutant that cannot be switched, it prints the number alone.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::error::Error;
use std::ops::Range;
use std::{env, fs};

use proc_macro2::Span;
use quote::ToTokens;
use serde::Deserialize;
use syn::BinOp;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

/// What `src/switch.rs` is called in the copy.
const SWITCH: &str = "crate::mutant_switch";

/// One entry of the list.
#[derive(Deserialize)]
struct Mutant {
    #[serde(skip)]
    number: usize,
    file: String,
    genre: String,
    replacement: String,
    span: Extent,
}

#[derive(Deserialize)]
struct Extent {
    start: Place,
}

/// Counted from one.
#[derive(Deserialize, PartialEq, Eq, Hash, Clone, Copy)]
struct Place {
    line: usize,
    column: usize,
}

/// What is written before a byte of the source.
struct Piece {
    at: usize,
    /// At one byte: ends before beginnings, and the larger outside.
    order: (bool, isize),
    text: String,
    /// The mutant that this is the text of, and its switch.
    mutant: Option<(usize, usize)>,
}

struct Rewriter<'a> {
    mutants: HashMap<Place, Vec<&'a Mutant>>,
    pieces: Vec<Piece>,
}

impl Rewriter<'_> {
    /// The mutants of this genre at this place, with what each puts there.
    fn mutants(&self, span: Span, genre: &str) -> Vec<(usize, String)> {
        let start = span.start();
        let at = self.mutants.get(&Place { line: start.line, column: start.column + 1 });
        at.into_iter()
            .flatten()
            .filter(|mutant| mutant.genre == genre)
            .map(|mutant| (mutant.number, mutant.replacement.clone()))
            .collect()
    }

    /// Writes at the beginning of something so large.
    fn begin(&mut self, at: usize, size: usize, text: String, mutant: Option<(usize, usize)>) {
        self.pieces.push(Piece { at, order: (true, -(size as isize)), text, mutant });
    }

    /// Writes at its end.
    fn end(&mut self, at: usize, size: usize, text: String, mutant: Option<(usize, usize)>) {
        self.pieces.push(Piece { at, order: (false, size as isize), text, mutant });
    }

    /// Makes an expression a match on its mutants.
    fn switch(&mut self, range: Range<usize>, mutants: Vec<(usize, String)>) {
        let Some(&(switch, _)) = mutants.first() else { return };
        let size = range.len();
        self.begin(range.start, size, format!("(match {SWITCH}::on({switch}) {{ "), None);
        for (number, text) in mutants {
            let text = format!("{number} => {text}, ");
            self.begin(range.start, size, text, Some((number, switch)));
        }
        self.begin(range.start, size, "_ => ".into(), None);
        self.end(range.end, size, " })".into(), None);
    }

    /// A function that returns at once.
    fn function(&mut self, block: &syn::Block) {
        let Some(first) = block.stmts.first() else { return };
        for (number, text) in self.mutants(first.span(), "FnValue") {
            let at = block.brace_token.span.open().byte_range().end;
            let text = format!(" if {SWITCH}::on({number}) == {number} {{ return {text}; }} ");
            self.begin(at, OUTERMOST, text, Some((number, number)));
        }
    }
}

/// Larger than any expression.
const OUTERMOST: usize = usize::MAX >> 1;

/// Whether a chain of conditions binds something here, so that this is no expression of its own.
fn binds(expr: &syn::Expr) -> bool {
    struct Find(bool);
    impl<'ast> Visit<'ast> for Find {
        fn visit_expr_let(&mut self, _: &'ast syn::ExprLet) {
            self.0 = true;
        }
        // A block has chains of its own.
        fn visit_block(&mut self, _: &'ast syn::Block) {}
    }
    let mut find = Find(false);
    find.visit_expr(expr);
    find.0
}

fn is_assignment(op: &BinOp) -> bool {
    use BinOp::*;
    matches!(
        op,
        AddAssign(_)
            | SubAssign(_)
            | MulAssign(_)
            | DivAssign(_)
            | RemAssign(_)
            | BitAndAssign(_)
            | BitOrAssign(_)
            | BitXorAssign(_)
            | ShlAssign(_)
            | ShrAssign(_)
    )
}

impl<'ast> Visit<'ast> for Rewriter<'_> {
    // What the compiler computes has no switch: it would be off.
    fn visit_item_const(&mut self, _: &'ast syn::ItemConst) {}
    fn visit_item_static(&mut self, _: &'ast syn::ItemStatic) {}
    fn visit_impl_item_const(&mut self, _: &'ast syn::ImplItemConst) {}
    fn visit_trait_item_const(&mut self, _: &'ast syn::TraitItemConst) {}
    fn visit_expr_const(&mut self, _: &'ast syn::ExprConst) {}
    fn visit_type_array(&mut self, _: &'ast syn::TypeArray) {}
    fn visit_generic_argument(&mut self, _: &'ast syn::GenericArgument) {}
    fn visit_variant(&mut self, _: &'ast syn::Variant) {}

    fn visit_expr_repeat(&mut self, expr: &'ast syn::ExprRepeat) {
        self.visit_expr(&expr.expr);
    }

    fn visit_item_fn(&mut self, function: &'ast syn::ItemFn) {
        self.function(&function.block);
        visit::visit_item_fn(self, function);
    }

    fn visit_impl_item_fn(&mut self, function: &'ast syn::ImplItemFn) {
        self.function(&function.block);
        visit::visit_impl_item_fn(self, function);
    }

    fn visit_trait_item_fn(&mut self, function: &'ast syn::TraitItemFn) {
        if let Some(block) = &function.default {
            self.function(block);
        }
        visit::visit_trait_item_fn(self, function);
    }

    fn visit_expr_binary(&mut self, expr: &'ast syn::ExprBinary) {
        if !binds(&expr.left) && !binds(&expr.right) {
            let (left, right) = (expr.left.to_token_stream(), expr.right.to_token_stream());
            let mut mutants = self.mutants(expr.op.span(), "BinaryOperator");
            for (_, text) in &mut mutants {
                *text = if is_assignment(&expr.op) {
                    format!("{{ {left} {text} {right} }}")
                } else {
                    format!("({left}) {text} ({right})")
                };
            }
            self.switch(expr.span().byte_range(), mutants);
        }
        visit::visit_expr_binary(self, expr);
    }

    fn visit_expr_unary(&mut self, expr: &'ast syn::ExprUnary) {
        let mut mutants = self.mutants(expr.op.span(), "UnaryOperator");
        for (_, text) in &mut mutants {
            *text = expr.expr.to_token_stream().to_string();
        }
        self.switch(expr.span().byte_range(), mutants);
        visit::visit_expr_unary(self, expr);
    }

    fn visit_expr_struct(&mut self, expr: &'ast syn::ExprStruct) {
        let mut mutants = Vec::new();
        for (at, field) in expr.fields.iter().enumerate() {
            let others = expr.fields.iter().enumerate().filter(|(other, _)| *other != at);
            let fields = others.map(|(_, field)| field.clone()).collect();
            let text = syn::ExprStruct { fields, ..expr.clone() }.to_token_stream().to_string();
            for (number, _) in self.mutants(field.span(), "StructField") {
                mutants.push((number, text.clone()));
            }
        }
        self.switch(expr.span().byte_range(), mutants);
        visit::visit_expr_struct(self, expr);
    }

    fn visit_arm(&mut self, arm: &'ast syn::Arm) {
        let guard = arm.guard.as_ref().map(|(_, guard)| guard);
        for (number, _) in self.mutants(arm.span(), "MatchArm") {
            let mutant = Some((number, number));
            let off = format!("{SWITCH}::on({number}) != {number}");
            match guard {
                None => {
                    let at = arm.pat.span().byte_range().end;
                    self.end(at, OUTERMOST, format!(" if {off}"), mutant);
                }
                Some(guard) if !binds(guard) => {
                    let Range { start, end } = guard.span().byte_range();
                    self.begin(start, OUTERMOST, format!("{off} && ("), mutant);
                    self.end(end, OUTERMOST, ")".into(), None);
                }
                Some(_) => {}
            }
        }
        if let Some(guard) = guard
            && !binds(guard)
        {
            let mutants = self.mutants(guard.span(), "MatchArmGuard");
            self.switch(guard.span().byte_range(), mutants);
        }
        visit::visit_arm(self, arm);
    }
}

/// Rewrites one file, and prints what became of its mutants.
fn rewrite(root: &str, file: &str, mutants: Vec<&Mutant>) -> Result<(), Box<dyn Error>> {
    let path = format!("{root}/{file}");
    let source = fs::read_to_string(&path)?;
    let numbers: Vec<usize> = mutants.iter().map(|mutant| mutant.number).collect();
    let mut by_place = HashMap::<_, Vec<_>>::new();
    for mutant in mutants {
        by_place.entry(mutant.span.start).or_default().push(mutant);
    }
    let mut rewriter = Rewriter { mutants: by_place, pieces: Vec::new() };
    rewriter.visit_file(&syn::parse_file(&source)?);
    let mut pieces = rewriter.pieces;
    // Stable: what was written at one place for one thing stays in order.
    pieces.sort_by_key(|piece| (piece.at, piece.order));

    let mut written = String::new();
    let mut done = 0;
    let mut switched = HashSet::new();
    for piece in &pieces {
        written += &source[done..piece.at];
        done = piece.at;
        let start = written.len();
        written += &piece.text;
        if let Some((number, switch)) = piece.mutant {
            switched.insert(number);
            println!("{number} {switch} {file} {start} {}", written.len());
        }
    }
    written += &source[done..];
    fs::write(&path, written)?;
    for number in numbers.iter().filter(|number| !switched.contains(number)) {
        println!("{number}");
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [list, root, without] = &arguments[..] else {
        return Err("usage: schemata LIST ROOT WITHOUT".into());
    };
    let without = fs::read_to_string(without)?
        .split_whitespace()
        .map(str::parse)
        .collect::<Result<HashSet<usize>, _>>()?;
    let mut list: Vec<Mutant> = serde_json::from_str(&fs::read_to_string(list)?)?;
    let mut files = BTreeMap::<_, Vec<_>>::new();
    for (number, mutant) in list.iter_mut().enumerate() {
        mutant.number = number;
    }
    for mutant in list.iter().filter(|mutant| !without.contains(&mutant.number)) {
        files.entry(mutant.file.as_str()).or_default().push(mutant);
    }
    for (file, mutants) in files {
        rewrite(root, file, mutants)?;
    }

    // The switch itself.
    fs::write(format!("{root}/src/mutant_switch.rs"), include_str!("switch.rs"))?;
    let path = format!("{root}/src/lib.rs");
    let lib = fs::read_to_string(&path)?;
    let features = "#![feature(core_intrinsics, const_eval_select)]";
    fs::write(&path, format!("{features} {lib}\nmod mutant_switch;\n"))?;
    Ok(())
}
