// Ask the search of the built site for the words of docs/questions.md, and fail where an answer's page is not among
// the first pages found: node docs/search_places.js, by `make site-search`. The search is the site's own, a web worker.

"use strict"
const fs = require("node:fs")
const path = require("node:path")
const vm = require("node:vm")

const FIRST = 2
const root = path.dirname(__dirname)
const workers = path.join(root, "site", "assets", "javascripts", "workers")
const answers = []
let ask

globalThis.self = globalThis
globalThis.importScripts = () => {}
globalThis.addEventListener = (kind, listener) => { ask = listener }
globalThis.postMessage = (message) => answers.push(message)

async function answerTo(message) {
  ask({ data: message })
  while (!answers.length) await new Promise((resume) => setTimeout(resume, 1))
  return answers.pop()
}

async function main() {
  const program = fs.readdirSync(workers).find((name) => name.endsWith(".js"))
  vm.runInThisContext(fs.readFileSync(path.join(workers, program), "utf8"))
  const index = JSON.parse(fs.readFileSync(path.join(root, "site", "search", "search_index.json"), "utf8"))
  await answerTo({ type: 0, data: { ...index, options: { suggest: true } } })
  const page = fs.readFileSync(path.join(root, "docs", "questions.md"), "utf8")
  const questions = [...page.matchAll(/\[`([^`]+)`\] \| .*?\]\(([\w.]+)\.md/g)]
  if (questions.length !== 10) throw new Error(`${questions.length} questions instead of 10`)
  for (const [, words, wanted] of questions) {
    const found = (await answerTo({ type: 2, data: words })).data.items
    const place = found.findIndex((sections) => sections[0].location.split("#")[0] === `${wanted}.html`) + 1
    const good = place > 0 && place <= FIRST
    console.log(`${good ? "ok" : "LATE"}  ${words}: ${wanted}.html is page ${place} of ${found.length}`)
    if (!good) process.exitCode = 1
  }
}

main()
