// Pages that are opened from a folder may not start a worker, which the search is: there a hidden frame does its work.
// MkDocs Material's offline plugin would fetch such a script from a server each time a page is viewed.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      const inside = this.frame.contentWindow
      window.addEventListener("message", event => {
        if (event.source !== inside) return
        const answer = new MessageEvent("message", { data: event.data })
        this.dispatchEvent(answer)
        if (this.onmessage) this.onmessage(answer)
      })
      const load = `
        postMessage = data => parent.postMessage(data, "*")
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done, failed) => {
          const script = document.createElement("script")
          Object.assign(script, { src: url, onload: done, onerror: failed })
          document.body.appendChild(script)
        })), Promise.resolve())`
      inside.document.open()
      inside.document.write(`<!DOCTYPE html><body><script>${load}<\/script><script src="${url}"><\/script>`)
      inside.document.close()
      this.ready = new Promise(done => inside.addEventListener("load", done))
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.frame.remove()
    }
  }
}
